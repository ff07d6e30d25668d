"""Losses per source of a blend, and per evaluation set."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from tests.e2e.conftest import NANO, Tool, losses, records
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
    done = tool.run(tmp_path, "Data.Eval.sets.a=nowhere/x")
    assert done.returncode == 2 and "Data.Eval.sets.a.input_dir (" in done.stderr, done.stderr


PLANS = (
    [],
    ["Distributed.pp_degree=2"],
    ["Distributed.pp_degree=2", "Model.virtual_pp_degree=2"],
    ["Distributed.mp_degree=2", "Model.sequence_parallel=True"],
    ["Distributed.dp_degree=2"],
    ["Distributed.sep_degree=2"],
)


def train_in_ranks(directory: str, output: str) -> None:
    """In each rank of a pool: the same training under some plans of its size."""
    import os

    from ppfleetx.commands.initialize import initialize
    from ppfleetx.commands.train import train

    size = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    for number, plan in enumerate(PLANS[1:] if size > 1 else PLANS[:1]):
        given = [
            f"Data.Train.dataset.input_dir={directory}",
            f"Data.Eval.sets={{a: {directory}/toy, b: {directory}/noise}}",
            f"Engine.save_load.output_dir={output}/{size}_{number}",
            "Engine.max_steps=2",
            "Engine.eval_freq=2",
            "Engine.log_source_loss=True",
            "Model.num_layers=4",
            "Global.global_batch_size=8",
            "Global.local_batch_size=null",
            "Model.hidden_dropout_prob=0",
            "Model.attention_probs_dropout_prob=0",
            *plan,
        ]
        train(*initialize(str(NANO), given, reads=("Train", "Eval")))


@pytest.mark.slow
def test_plans_record_the_same(pools: Pools, both: Path, tmp_path: Path) -> None:
    arguments = {"directory": str(both), "output": str(tmp_path)}
    for size in (1, 2):
        pools(size).run("tests.e2e.test_sources:train_in_ranks", timeout=120.0, **arguments)
    expected = {kind: records(tmp_path / "1_0", kind) for kind in ("train", "eval")}
    for number in range(len(PLANS) - 1):
        for kind, records_of_one in expected.items():
            found = records(tmp_path / f"2_{number}", kind)
            assert len(found) == len(records_of_one) > 1
            for record, one in zip(found, records_of_one, strict=True):
                assert record["loss"] == pytest.approx(one["loss"], rel=1e-5)
                assert record.get("set") == one.get("set")
                for name, source in record.get("sources", {}).items():
                    assert source == pytest.approx(one["sources"][name], rel=1e-5)
