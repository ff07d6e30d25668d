"""The examples of docs/extending.md, taken from the page: they run as it says, and do what they promise."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from tests.docs.blocks import ROOT, blocks, commands, to_run
from tests.e2e import program
from tests.helpers import programs
from tests.helpers.ranks import Pools

BLOCKS = list(blocks(ROOT / "docs/extending.md"))
COMMANDS = [to_run(command) or "" for block in BLOCKS if block.is_shell for command in commands(block)]
EXAMPLES = [
    *("scale_norm", "parallel_gpt", "layer_scale", "penalized_gpt", "two_experts", "fill", "csv_log", "lion"),
    *("counting", "small_parts", "geglu", "gathered_attention", "whole_matrix_rule"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of the page and token files in ``data``."""
    folder = tmp_path_factory.mktemp("extending")
    (folder / "data").mkdir()
    (folder / "tools").symlink_to(ROOT / "tools")
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, folder)
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "data/toy", np.uint16) as writer:
        for _ in range(200):
            start, length = rng.integers(0, 509), rng.integers(20, 120)
            writer.add_document(np.append((start + np.arange(length)) % 509, 511), [length + 1])
    for block in BLOCKS:
        if block.title:
            (folder / block.title).write_text(block.text + "\n")
    programs.ok(words(command_with("configs copy")), **place(folder))
    return folder


def words(command: str) -> list[str]:
    """A command of the page, as this Python runs it."""
    first, *rest = shlex.split(command.replace("\\\n", " "))
    return [*{"ppfleetx": [sys.executable, "-m", "ppfleetx"], "python": [sys.executable]}[first], *rest]


def place(folder: Path) -> dict[str, Any]:
    """Where it runs."""
    return {"cwd": folder, "env": {**programs.one_thread(), "PYTHONPATH": str(ROOT)}}


def train(folder: Path, name: str, *more: str, fresh: bool = True) -> list[dict[str, Any]]:
    """Run the example's command; the steps that it recorded, in which it learned something."""
    output = folder / "output" / name
    if fresh:
        shutil.rmtree(output, ignore_errors=True)
    done = programs.ok([*words(command_of(name)), *more], **place(folder))
    assert "CPU settings come too late" not in done.stdout
    found = program.records(output, "train")
    assert found[-1]["loss"] < found[0]["loss"]
    return found


def command_of(name: str) -> str:
    return next(c for c in COMMANDS if re.match(rf"ppfleetx train .*--plugin {name}\b", c))


def command_with(text: str) -> str:
    return next(command for command in COMMANDS if text in command)


def losses(pools: Pools, plan: Plan, folder: Path, plugin: str, name: str, **more: Any) -> list[float]:
    """Losses of a run under ``plan`` in the ranks of a pool."""
    output = folder / "ranks" / f"{plugin} {name}"
    small = {"Model.num_layers": 2, **more}
    values = program.values_of(plan, folder / "data", output, overrides=small)
    world = plan.world_size
    said = pools(world).run(
        "tests.e2e.plugins:train",
        values=values,
        world=world,
        folder=str(folder),
        plugin=plugin,
    )
    assert said == [""] * world, said
    return [loss for _, loss, _ in program.losses(output)]


def equal_losses(pools: Pools, folder: Path, plugin: str, *plans: Plan, **more: Any) -> list[float]:
    """Losses of one process, which those under the plans are equal to."""
    one = losses(pools, Plan(), folder, plugin, "one", **more)
    for plan in plans:
        assert losses(pools, plan, folder, plugin, str(plan), **more) == pytest.approx(one, rel=2e-5)
    return one


def test_the_page_has_a_command_and_a_file_for_every_example(folder: Path) -> None:
    assert all(command_of(name) and (folder / f"{name}.py").is_file() for name in EXAMPLES)


@pytest.mark.parametrize("name", ["penalized_gpt", "lion"])
def test_the_page_shows_the_example_as_it_is(folder: Path, name: str) -> None:
    """Written from the page, after the examples were copied; tests/parity tests the examples."""
    assert (folder / f"{name}.py").read_text() == (ROOT / f"examples/{name}.py").read_text()


def test_a_normalization(folder: Path, pools: Pools) -> None:
    train(folder, "scale_norm")
    manifest = json.loads((folder / "output/scale_norm/epoch_0_step_8/manifest.json").read_text())
    names = str(manifest)
    assert "decoder.final_norm.weight" in names and "decoder.final_norm.bias" not in names
    split = Plan(mp=2, sequence_parallel=True)
    equal_losses(pools, folder, "scale_norm", split, **{"Model.normalization": "ScaleNorm"})


def test_an_architecture_runs_under_every_plan(folder: Path, pools: Pools) -> None:
    train(folder, "parallel_gpt")
    saved = yaml.safe_load((folder / "output/parallel_gpt/config.yaml").read_text())
    assert saved["Global"]["plugins"] == ["parallel_gpt"]
    again = programs.refused(words("ppfleetx check -c output/parallel_gpt"), **place(folder))
    assert "needs the plugin parallel_gpt" in again
    programs.ok(words(command_with("paddle.distributed.launch")), **place(folder))
    assert len(program.records(folder / "output/parallel_gpt_mp2", "train")) == 8
    changes = {"Model.name": "ParallelGPT"}
    one = equal_losses(pools, folder, "parallel_gpt", Plan(mp=2), Plan(pp=2), **changes)
    again = {**changes, "Model.use_recompute": True, "Model.recompute_granularity": "full_attn"}
    recomputed = losses(pools, Plan(), folder, "parallel_gpt", "recomputed", **again)
    assert recomputed == pytest.approx(one, rel=1e-6)
    plain = losses(pools, Plan(), folder, "parallel_gpt", "gpt", **{"Model.name": "GPT"})
    assert plain != pytest.approx(one, rel=1e-3), "it is another function"


@pytest.mark.parametrize(("name", "metric"), [("penalized_gpt", "trunk_size"), ("two_experts", "balance")])
def test_a_loss_with_two_parts_is_in_the_log(folder: Path, name: str, metric: str) -> None:
    """tests/parity/test_aux_loss.py runs it under the plans."""
    done = programs.ok(words(command_of(name)), **place(folder))
    found = program.records(folder / "output" / name)
    assert {record["kind"] for record in found} == {"train", "eval"}
    for record in found:
        value = record["metrics"][metric]
        if record["kind"] == "train":
            assert f"metrics at global step {record['step']}, {metric}: {value:.9g}\n" in done.stdout


def test_experts_under_four_ranks_have_their_balance_in_the_log(folder: Path) -> None:
    programs.ok(words(command_with("two_experts_dp2_mp2")), **place(folder))
    found = program.records(folder / "output/two_experts_dp2_mp2", "train")
    assert len(found) == 8 and all(1.0 < record["metrics"]["balance"] < 2.0 for record in found)


def test_a_metric_of_a_task(folder: Path, pools: Pools) -> None:
    counted = {record["metrics"]["fill"] for record in train(folder, "fill")}
    assert counted == {1.0}
    changes = {"Model.module": "GPTWithFill"}
    for name, plan in {"one": Plan(), "mp2": Plan(mp=2), "pp2": Plan(pp=2), "sep2": Plan(sep=2)}.items():
        losses(pools, plan, folder, "fill", name, **changes)
        found = program.records(folder / "ranks" / f"fill {name}", "train")
        assert {record["metrics"]["fill"] for record in found} == {1.0}


def test_a_layer_declares_a_parameter_of_its_own(folder: Path, pools: Pools) -> None:
    train(folder, "layer_scale")
    plans = (Plan(mp=2, sequence_parallel=True), Plan(sharding=2, sharding_stage=3))
    equal_losses(pools, folder, "layer_scale", *plans, **{"Model.name": "ScaledGPT"})


def test_another_attention_strategy(folder: Path, pools: Pools) -> None:
    """tests/parity/test_plans.py runs it under other plans."""
    equal_losses(pools, folder, "gathered_attention", Plan(sep=2), **{"Model.name": "GatheredGPT"})
    assert len(train(folder, "gathered_attention")) == 8


def test_a_callback_writes_a_file_and_keeps_its_state(folder: Path) -> None:
    without = command_of("csv_log").replace("--plugin csv_log", "")
    assert "needs the plugin csv_log" in programs.refused(words(without), **place(folder))
    fixed = ("-o", "Optimizer.lr.decay_steps=8", "-o", "Engine.callbacks.1.options.every=1")
    train(folder, "csv_log", *fixed, "-o", "Engine.max_steps=4")
    found = train(folder, "csv_log", *fixed, "-o", "Engine.save_load.resume=auto", fresh=False)
    with (folder / "output/csv_log/loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(r["step"], r["loss"]) for r in found]
    lowest = np.minimum.accumulate([record["loss"] for record in found])
    assert [float(row["lowest"]) for row in rows] == lowest.tolist() and len(rows) == 8


@pytest.mark.parametrize(
    ("precision", "on_host"), [("float32", False), ("float32", True), ("bfloat16", True), ("bfloat16", False)]
)
def test_lion_is_its_formula(folder: Path, pools: Pools, precision: str, on_host: bool) -> None:
    [found] = pools(1).run(
        "tests.e2e.plugins:lion_steps", folder=str(folder), precision=precision, on_host=on_host
    )
    for name, start in found["starts"].items():
        value, momentum = np.array(start), 0.0
        decay = 0.1 if name == "a.weight" else 0.0
        for step, gradients in enumerate(found["gradients"], start=1):
            gradient, lr = np.array(gradients[name]), 0.01 * step
            value = value * (1 - lr * decay) - lr * np.sign(0.9 * momentum + 0.1 * gradient)
            momentum = 0.99 * momentum + 0.01 * gradient
        np.testing.assert_allclose(found["states"][f"{name}/momentum"], momentum, rtol=1e-5, atol=1e-7)
        near = {"rtol": 1e-5, "atol": 1e-6} if precision == "float32" else {"rtol": 1e-2}
        np.testing.assert_allclose(found["values"][name], value, **near)
        if precision != "float32":
            np.testing.assert_allclose(found["states"][f"{name}/master_weight"], value, rtol=1e-5, atol=1e-6)


def test_an_optimizer_is_sharded_saved_and_resumed(folder: Path, pools: Pools) -> None:
    train(folder, "lion")
    changes = {"Optimizer.name": "Lion", "Optimizer.lr.max_lr": 3e-4, "Optimizer.lr.decay_steps": 6}
    offload = Plan(sharding=2, sharding_stage=2, sharding_offload=True)
    one = equal_losses(pools, folder, "lion", offload, **changes)
    for stage in (1, 2, 3):
        plan = Plan(sharding=2, sharding_stage=stage)
        more = {**changes, "Engine.max_steps": 3, "Engine.save_load.resume": "auto"}
        began = losses(pools, plan, folder, "lion", f"stage {stage}", **more)
        assert began == pytest.approx(one[:3], rel=2e-5)
        more["Engine.max_steps"] = 6
        assert losses(pools, Plan(), folder, "lion", f"stage {stage}", **more) == pytest.approx(one, rel=2e-5)


def test_an_optimizer_with_its_own_groups(folder: Path) -> None:
    """tests/parity/test_whole_matrices.py runs it under the plans."""
    train(folder, "whole_matrix_rule")


def test_a_data_set(folder: Path) -> None:
    found = train(folder, "counting")
    assert found[0]["tokens"] == 4 * 32
    keys = ("Engine.save_load.resume=auto", "Engine.max_steps=9", "Optimizer.lr.decay_steps=8")
    continues = [word for key in keys for word in ("-o", key)]
    assert len(train(folder, "counting", *continues, fresh=False)) == 9
    command = [*words(command_of("counting")), *continues, "-o"]
    for option, said in (
        ("Data.Train.dataset.options.step=5", "the training data or its order is not the one"),
        ("Data.Train.dataset.options.steps=5", "Counting has no option steps; it takes step, num_samples"),
    ):
        assert said in programs.refused([*command, option], **place(folder))


def test_a_schedule_and_an_activation(folder: Path) -> None:
    found = train(folder, "small_parts")
    rates = [1e-3 * n / 2 for n in (1, 2)] + [1e-4 + 9e-4 * ((8 - n) / 6) ** 2 for n in range(3, 9)]
    assert [record["lr"] for record in found] == pytest.approx(rates)
    typo = words(command_of("small_parts").replace("=softplus", "=softplsu"))
    assert "did you mean softplus?" in programs.refused(typo, **place(folder))


def test_an_activation_with_a_gate(folder: Path, pools: Pools) -> None:
    train(folder, "geglu")
    equal_losses(pools, folder, "geglu", Plan(mp=2), **{"Model.hidden_act": "geglu"})
