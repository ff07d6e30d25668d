"""Plugins on the command line and in the environment, and a callback that one brings."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.e2e import program
from tests.e2e.conftest import NANO, Tool, environment, losses
from tests.helpers import programs
from tests.helpers.ranks import Pools

PLUGIN = '''
from ppfleetx.config.errors import UserError
from ppfleetx.config.registries import CALLBACKS
from ppfleetx.core.engine.callbacks.base import Callback


@CALLBACKS.register("mean_loss")
class MeanLoss(Callback):
    """Keeps the mean loss of the whole run, and gives up at a chosen step."""

    def __init__(self, run, file="mean.txt", give_up_at=0, fails_at_end=False):
        self.path, self.give_up_at, self.fails_at_end = run.output_dir / file, give_up_at, fails_at_end
        self.sum, self.steps = 0.0, 0

    def on_step_end(self, engine, record):
        self.sum, self.steps = self.sum + record.loss, self.steps + 1
        if record.step == self.give_up_at:
            raise UserError(f"gave up at step {record.step}")

    def on_fit_end(self, engine):
        if self.fails_at_end:
            raise UserError("no end")
        self.path.write_text(f"{self.steps} {self.sum / max(1, self.steps)!r}")

    def state(self):
        return {"sum": self.sum, "steps": self.steps}

    def load_state(self, state):
        self.sum, self.steps = state["sum"], state["steps"]
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with plugins and a configuration that needs one."""
    (tmp_path / "mean_loss_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "ending_plugin.py").write_text("import sys\n\nsys.exit(3)\n")
    text = NANO.read_text().replace("Global:\n", "Global:\n  plugins: [mean_loss_plugin]\n")
    assert text.count("\nEngine:\n") == 1
    callbacks = "\nEngine:\n  callbacks: [default, {name: mean_loss, options: {file: a.txt}}]\n"
    (tmp_path / "config.yaml").write_text(text.replace("\nEngine:\n", callbacks))
    shutil.copytree(NANO.parent / "..", tmp_path / "configs")
    return tmp_path


@pytest.fixture
def command(tool: Tool, folder: Path) -> list[str]:
    """Training with the configuration of ``folder``, where it is to be run."""
    overrides = ("Engine.max_steps=3", "Engine.save_load.save_steps=2", "Engine.eval_freq=0")
    return tool.command("tools/train.py", folder / "out", *overrides, config=folder / "config.yaml")


def test_a_plugin_is_named_by_the_command_line_or_the_environment(folder: Path, command: list[str]) -> None:
    refused = programs.refused(command, cwd=folder)
    assert "this configuration needs the plugin mean_loss_plugin" in refused
    done = programs.ok([*command, "--plugin", "mean_loss_plugin"], cwd=folder)
    assert "CPU settings come too late" not in done.stdout
    steps, mean = (folder / "out/a.txt").read_text().split()
    found = [loss for _, loss, _ in losses(folder / "out")]
    assert int(steps) == len(found) == 3 and float(mean) == pytest.approx(sum(found) / 3)
    manifest = json.loads((folder / "out/epoch_0_step_2/manifest.json").read_text())
    assert manifest["state"]["callbacks"] == {"mean_loss": {"steps": 2, "sum": pytest.approx(sum(found[:2]))}}
    assert "mean_loss_plugin" in (folder / "out/config.yaml").read_text()
    variable = {**environment(), "PPFLEETX_PLUGINS": "mean_loss_plugin"}
    programs.ok([*command, "--check", "-o", "Engine.save_load.overwrite=True"], cwd=folder, env=variable)


MISTAKEN = ("-o", "Engine.callbacks=[{name: mean_loss, options: {fil: b}}]")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such_plugin"], "--plugin = 'no_such_plugin': there is no such module"),
        (["./mean_loss_plugin.py"], "must be the name of a module, such as mean_loss_plugin, not a path"),
        (["broken_plugin"], "ZeroDivisionError: division by zero ("),
        (["mean_loss_plugin", *MISTAKEN], "it takes file"),
        (["mean_loss_plugin", "--check", *MISTAKEN], "it takes file"),
        (["ending_plugin"], "SystemExit: 3 ("),
    ],
)
def test_what_is_wrong_with_a_plugin_is_a_sentence(
    folder: Path, command: list[str], words: list[str], said: str
) -> None:
    assert said in programs.refused([*command, "--plugin", *words], cwd=folder)


GLUTTON = """
import paddle

from ppfleetx.config.registries import CALLBACKS
from ppfleetx.core.engine.callbacks.base import Callback


@CALLBACKS.register("glutton")
class Glutton(Callback):
    def __init__(self, setup):
        pass

    def on_step_end(self, run, record):
        if record.step == 2:
            paddle.ones([10**8, 10**6])
"""


def test_a_run_that_is_out_of_memory_ends_with_one_message(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "glutton.py").write_text(GLUTTON)
    command = tool.command("tools/train.py", tmp_path / "run", "Engine.callbacks=[default, glutton]")
    done = programs.run([*command, "--plugin", "glutton"], timeout=120, cwd=tmp_path, env=environment())
    assert done.returncode == 5, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "error:" in line]
    assert line.startswith("error: out of memory (between two steps, step 2): Fail to alloc memory of 4")
    assert "Predicted memory at the peak: " in done.stderr
    assert "Traceback" not in done.stderr


def train_with(pools: Pools, plan: Plan, values: dict[str, object], folder: Path, plugin: str) -> list[str]:
    """Train with a plugin of ``folder``; what the ranks ended with."""
    arguments = {"values": values, "world": plan.world_size, "folder": str(folder), "plugin": plugin}
    return pools(plan.world_size).run("tests.e2e.plugins:train", **arguments)


def test_states_of_callbacks_go_from_plan_to_plan_and_errors_to_all_ranks(
    pools: Pools, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "rank_plugin.py").write_text(PLUGIN)
    values = {
        "Engine.callbacks": "[default, mean_loss]",
        "Engine.save_load.resume": "auto",
        "Optimizer.lr.decay_steps": 6,
    }

    def train(which: Plan, name: str, **more: object) -> str:
        given = program.values_of(which, corpus, tmp_path / name, overrides={**values, **more})
        return train_with(pools, which, given, tmp_path, "rank_plugin")

    train(Plan(), "out", **{"Engine.max_steps": 3})
    train(Plan(pp=2), "out", **{"Engine.max_steps": 6})
    gives_up = "[default, {name: mean_loss, options: {give_up_at: 2}}]"
    ended = train(Plan(pp=2), "other", **{"Engine.callbacks": gives_up})
    found = [loss for _, loss, _ in program.losses(tmp_path / "out")]
    steps, mean = (tmp_path / "out/mean.txt").read_text().split()
    assert int(steps) == len(found) == 6 and float(mean) == pytest.approx(sum(found) / 6)
    assert ended == ["rank 0: gave up at step 2"] * 2
    assert len(program.losses(tmp_path / "other")) == 2
    fails_at_end = "[default, {name: mean_loss, options: {fails_at_end: true}}]"
    values |= {"Engine.max_steps": 3, "Engine.callbacks": fails_at_end}
    assert train(Plan(pp=2), "third") == ["rank 0: no end"] * 2
    both = f"{fails_at_end[:-3]}, give_up_at: 2}}}}]"
    assert train(Plan(pp=2), "fourth", **{"Engine.callbacks": both}) == ["rank 0: gave up at step 2"] * 2


PARTS = """
from dataclasses import replace

import numpy as np
import paddle

from ppfleetx.config.registries import MODULES, POSITIONS, TOKENIZERS, ModuleTraits
from ppfleetx.core.module.gpt import GPTModule
from ppfleetx.nn.positions import Positions


@POSITIONS.register("sinus")
def sinus(cfg):
    rates = paddle.to_tensor(100.0 ** -np.linspace(0, 1, cfg.hidden_size), "float32")
    return Positions(added=lambda ids: paddle.sin(ids.astype("float32").unsqueeze(-1) * rates))


@MODULES.register("HalvedLoss", traits=ModuleTraits(refused_axes=("sep",)))
class HalvedLoss(GPTModule):
    def loss(self, outputs, batch, factory):
        found = super().loss(outputs, batch, factory)
        return replace(found, loss=found.loss / 2)


@TOKENIZERS.register("Letters")
def letters(cfg):
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

    words = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    model = {"type": "WordLevel", "vocab": {**words, "<|endoftext|>": 27}, "unk_token": "<|endoftext|>"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    return Tokenizer({"version": "1.0", "model": model, "pre_tokenizer": split})
"""


@pytest.mark.slow
def test_a_task_a_position_embedding_and_a_tokenizer_of_ones_own(
    pools: Pools, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "parts_plugin.py").write_text(PARTS)

    def train(which: Plan, name: str, module: str) -> list[float]:
        parts = {
            "Engine.max_steps": 3,
            "Data.tokenizer": "{name: Letters}",
            "Model.position_embedding_type": "sinus",
            "Model.module": module,
        }
        given = program.values_of(which, corpus, tmp_path / name, overrides=parts)
        said = train_with(pools, which, given, tmp_path, "parts_plugin")
        assert said == [""] * which.world_size, said
        return [loss for _, loss, _ in program.losses(tmp_path / name)]

    one = train(Plan(), "one", "HalvedLoss")
    assert train(Plan(mp=2), "mp2", "HalvedLoss") == pytest.approx(one, rel=2e-5)
    whole = train(Plan(), "whole", "GPTModule")
    assert one[0] == pytest.approx(whole[0] / 2, rel=1e-6)
    manifest = json.loads((tmp_path / "one/epoch_0_step_3/manifest.json").read_text())
    assert "position_embeddings" not in json.dumps(manifest["tensors"])
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

    saved = Tokenizer.load(tmp_path / "one/tokenizer")
    assert list(saved.encode("a cab")) == [0, 26, 2, 0, 1]
    _check_conversion(tmp_path)


def _check_conversion(folder: Path) -> None:
    """A model with a part of a plugin is converted and quantized by whoever names the plugin."""
    kinds = "--from ppfleetx --to ppfleetx --dtype bfloat16 --input"
    commands = {"convert": kinds.split(), "quantize": ["--to", "int8"], "generate": []}

    def command(verb: str, *words: str) -> list[str]:
        return [sys.executable, "-m", "ppfleetx", verb, *commands[verb], str(folder / "one"), *words]

    here = {"PYTHONPATH": os.pathsep.join([str(folder), environment().get("PYTHONPATH", "")])}
    given = {"cwd": folder, "env": {**environment(), **here}}
    named = {"cwd": folder, "env": {**given["env"], "PPFLEETX_PLUGINS": "parts_plugin"}}
    refused = programs.refused(command("convert", "--output", "none"), **given)
    assert "position_embedding_type" in refused and not (folder / "none").exists()
    refused = programs.refused(command("generate", "a"), **given)
    assert "this configuration needs the plugin" in refused
    for verb, output, words, options in (
        ("convert", "argument", ("--plugin", "parts_plugin"), given),
        ("convert", "variable", (), named),
        ("quantize", "small", (), named),
    ):
        programs.ok(command(verb, *words, "--output", output), **options)
        assert list((folder / output).glob("epoch_*/manifest.json"))
