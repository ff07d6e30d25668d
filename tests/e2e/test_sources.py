"""Losses per source of a blend, and per evaluation set."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from tests.e2e.conftest import Tool, losses, records
from tests.e2e.program import run
from tests.helpers.ranks import Pools


@pytest.fixture(scope="module")
def both(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of two corpora: one that can be learnt, and noise."""
    directory = tmp_path_factory.mktemp("both")
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", directory)
    rng = np.random.default_rng(1)
    with IndexedDatasetWriter(directory / "noise", np.uint16) as writer:
        for _ in range(100):
            writer.add_document(rng.integers(0, 509, 80).astype(np.uint16), [80])
    return directory


def test_a_blend_tells_the_loss_of_each_corpus(both: Path, tmp_path: Path) -> None:
    tool, keys = Tool(both), ["Engine.max_steps=4", "Engine.eval_freq=0"]
    tool.ok(tmp_path / "silent", *keys)
    done = tool.ok(tmp_path / "logged", *keys, "Engine.log_source_loss=True")
    assert losses(tmp_path / "logged") == losses(tmp_path / "silent")
    assert "sources" not in records(tmp_path / "silent", "train")[0]
    for record in records(tmp_path / "logged", "train"):
        sources = record["sources"]
        assert sources.keys() <= {"toy", "noise"}
        assert sum(s["tokens"] for s in sources.values()) == record["tokens"]
        total = sum(s["loss"] * s["tokens"] for s in sources.values())
        assert total / record["tokens"] == pytest.approx(record["loss"], rel=1e-6)
    sources = records(tmp_path / "logged", "train")[0]["sources"]
    shown = ", ".join(f"{name}: {source['loss']:.9f}" for name, source in sources.items())
    assert f"loss per source at global step 1, {shown}\n" in done.stdout


SETS = "{toy: TOY, noise: {input_dir: NOISE, split: [0, 1, 0]}}"


def test_named_evaluation_sets(both: Path, tmp_path: Path) -> None:
    tool = Tool(both / "toy")
    sets = SETS.replace("TOY", str(both / "toy")).replace("NOISE", str(both / "noise"))
    keys = ["Engine.max_steps=4", "Engine.eval_freq=2", "Engine.save_load.save_steps=2"]
    named = [*keys, f"Data.Eval.sets={sets}", "Engine.save_load.keep_best=loss"]
    done = tool.ok(tmp_path / "whole", *named)
    found = records(tmp_path / "whole", "eval")
    assert [(r["step"], r["set"]) for r in found] == [(n, s) for n in (0, 2, 4) for s in ("toy", "noise")]
    assert re.search(r"eval at global step 4, loss: .*, cost: \d+\.\d+ sec, set: noise\n", done.stdout)
    tool.ok(tmp_path / "alone", *keys)
    expected = [r["loss"] for r in records(tmp_path / "alone", "eval")]
    assert [r["loss"] for r in found if r["set"] == "toy"] == expected, (
        "a set is evaluated as if it were alone"
    )
    assert losses(tmp_path / "alone") == losses(tmp_path / "whole")
    best = min((r["loss"], r["step"]) for r in found if r["set"] == "toy" and r["step"])
    assert f"epoch_0_step_{best[1]}" in (tmp_path / "whole/best").read_text()

    shutil.rmtree(tmp_path / "whole/epoch_0_step_4")
    tool.ok(tmp_path / "whole", *named, "Engine.save_load.resume=auto")
    assert [{**r, "seconds": 0} for r in records(tmp_path / "whole", "eval")] == [
        {**r, "seconds": 0} for r in found
    ]
    ckpt = f"Engine.save_load.ckpt_dir={tmp_path}/whole"
    judged = tool.ok(tmp_path / "eval", f"Data.Eval.sets={sets}", ckpt, script="tools/eval.py")
    assert re.findall(r"loss: (\d\.\d{9}).*, set: (\w+)\n", judged.stdout) == [
        (f"{r['loss']:.9f}", r["set"]) for r in found[-2:]
    ]


def test_a_missing_corpus_is_reported_by_its_set(tool: Tool, tmp_path: Path) -> None:
    assert "Data.Eval.sets.a.input_dir (" in tool.refused(tmp_path, "Data.Eval.sets.a=nowhere/x")


PLANS = (
    Plan(pp=2),
    Plan(pp=2, virtual_pp_degree=2),
    Plan(mp=2, sequence_parallel=True),
    Plan(dp=2),
    Plan(sep=2),
)


@pytest.mark.slow
def test_plans_record_the_same(pools: Pools, both: Path, tmp_path: Path) -> None:
    keys = {
        "Engine.max_steps": 2,
        "Engine.eval_freq": 2,
        "Engine.log_source_loss": True,
        "Model.num_layers": 4,
        "Data.Eval.sets": f"{{a: {both}/toy, b: {both}/noise}}",
    }
    for plan in (Plan(), *PLANS):
        run(pools, plan, both, tmp_path / str(plan), overrides=keys)
    for plan in PLANS:
        for kind in ("train", "eval"):
            expected, found = (records(tmp_path / str(one), kind) for one in (Plan(), plan))
            assert len(found) == len(expected) > 1
            for record, one in zip(found, expected, strict=True):
                assert record["loss"] == pytest.approx(one["loss"], rel=1e-5)
                assert record.get("set") == one.get("set")
                for name, source in record.get("sources", {}).items():
                    assert source == pytest.approx(one["sources"][name], rel=1e-5)
