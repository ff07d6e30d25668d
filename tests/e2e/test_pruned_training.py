"""Pruning while training through the tools: along a schedule, resumed, taken out; once, with a teacher."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.reader import Checkpoint, open_checkpoint
from ppfleetx.commands.checkpoint_verbs import Prune
from ppfleetx.commands.prune import REPORT_FILE, prune
from ppfleetx.compress.prune import parts_of
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.stage import canonical_parameters
from tests.e2e.conftest import FOUR_STEPS, LLAMA_NANO, NANO, Tool, losses, records

KEY = "Compress.Prune."
ON = f"{KEY}enable=True"
SCHEDULE = (ON, f"{KEY}ratio=0.5", f"{KEY}begin_step=4", f"{KEY}end_step=12", f"{KEY}frequency=4")
# Of 4 heads 1 goes after 8 steps (0.5 * 7 / 8), and 2 are gone after 12.
LONG = ("Engine.max_steps=40", "Engine.save_load.save_steps=4", "Engine.eval_freq=0")
SHORT = FOUR_STEPS
INIT, CKPT = "Engine.save_load.init_from", "Engine.save_load.ckpt_dir"


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    section = checkpoint.manifest.config["Model"]
    return ModelConfig(**{key: value for key, value in section.items() if key in ModelConfig.model_fields})


def gone(checkpoint: Checkpoint, layer: int, block: str) -> list[int]:
    """Groups (``attention``) or units (``mlp``) of a layer that are zero, in every tensor that has a part of
    them, its bias and both moments too."""
    model, found = model_of(checkpoint), []
    for kind, name, state in checkpoint_keys(checkpoint):
        before = f"decoder.layers.{layer}."
        entry = checkpoint.entry(name, kind, state)
        if not name.startswith(f"{before}{block}.") or not entry.shape:
            continue
        parts = parts_of(name.removeprefix(before), entry.shape, model)
        if parts is not None and len(entry.shape) > 0 and entry.shape[parts.axis] > 1:
            values = np.moveaxis(checkpoint.read(name, kind, state), parts.axis, 0)
            each = (values == 0).reshape(values.shape[0] // parts.width, -1).all(axis=1)
            found.append(np.flatnonzero(each).tolist())
    assert len(found) >= 6
    assert all(one == found[0] for one in found)
    return found[0]


def checkpoint_keys(checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    return list(checkpoint.manifest.tensors)


def logits(checkpoint: Checkpoint) -> np.ndarray:
    model = StagedModel(gpt_stages(model_of(checkpoint), LocalFactory()), seed=None)
    for name, parameter in canonical_parameters(model).items():
        parameter.set_value(checkpoint.read(name))
    model.eval()
    tokens = np.random.default_rng(0).integers(0, 509, (2, 32))
    with paddle.no_grad():
        return model(paddle.to_tensor(tokens)).numpy()


@pytest.fixture(scope="module", params=[NANO, LLAMA_NANO], ids=["gpt", "llama"])
def scheduled(request, tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A run of 40 steps that pruned along a schedule while it saved in the background; its configuration and
    what it said."""
    output_dir = tmp_path_factory.mktemp("scheduled") / "run"
    done = tool.ok(output_dir, *LONG, *SCHEDULE, "Engine.save_load.async_save=True", config=request.param)
    return output_dir, request.param, done.stdout + done.stderr


@pytest.mark.slow_after(1)
def test_what_is_taken_out_stays_out(scheduled) -> None:
    output_dir, _, said = scheduled
    steps = {step: open_checkpoint(output_dir / f"epoch_0_step_{step}") for step in (8, 12, 16, 40)}
    model = model_of(steps[40])
    for layer in range(model.num_layers):
        for block, total in (("attention", model.kv_heads), ("mlp", model.ffn_size)):
            found = {step: gone(checkpoint, layer, block) for step, checkpoint in steps.items()}
            # A checkpoint is of before what happens after its steps.
            assert {step: len(parts) for step, parts in found.items()} == {
                8: 0,
                12: int(total * 0.4375),
                16: total // 2,
                40: total // 2,
            }
            assert set(found[12]) <= set(found[16])
            assert found[16] == found[40]
    assert said.count("pruned after ") == 2
    assert "units of each layer are zero, 50.0% of the layers' matrices. The smaller model: " in said
    assert f"ppfleetx prune {output_dir} --ratio 0.5 --criterion l1_norm --output {output_dir}-pruned" in said
    shares = [record["pruned"] for record in records(output_dir, "train")]
    assert shares[:8] == [0.0] * 8
    assert 0 < shares[8] == shares[11] < shares[12] == shares[39] == 0.5


def test_the_smaller_model_computes_the_same(scheduled, tmp_path: Path) -> None:
    output_dir, _, _ = scheduled
    small = open_checkpoint(
        prune(Prune(checkpoint=str(output_dir), output=str(tmp_path / "small"), ratio=0.5))
    )
    whole = open_checkpoint(output_dir / "epoch_0_step_40")
    report = json.loads((tmp_path / "small" / REPORT_FILE).read_text())
    for layer, left in enumerate(report["layers"]):
        for block, kept, total in (
            ("attention", left["groups"], model_of(whole).kv_heads),
            ("mlp", left["units"], model_of(whole).ffn_size),
        ):
            assert sorted(kept + gone(whole, layer, block)) == list(range(total))
    np.testing.assert_allclose(logits(small), logits(whole), rtol=0, atol=1e-5)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("step", [8, 12, 20])
def test_a_resumed_run_goes_on_bit_for_bit(scheduled, tool: Tool, tmp_path: Path, step: int) -> None:
    output_dir, config, _ = scheduled
    start = f"{CKPT}={output_dir}/epoch_0_step_{step}"
    tool.ok(tmp_path / "again", *LONG, *SCHEDULE, start, config=config)
    assert losses(tmp_path / "again") == losses(output_dir)[step:]
    ends = [open_checkpoint(place / "epoch_0_step_40") for place in (tmp_path / "again", output_dir)]
    for kind, name, state in checkpoint_keys(ends[0]):
        assert np.array_equal(*(end.read(name, kind, state) for end in ends)), name


def test_once_before_the_first_step_as_the_command_prunes(tool: Tool, plain: Path, tmp_path: Path) -> None:
    """FleetX's meaning, with its keys."""
    given = (ON, f"{KEY}criterion=l2_norm", f"{KEY}ratio=0.25", f"{INIT}={plain}")
    done = tool.ok(tmp_path / "run", *SHORT, *given, f"Compress.Distill.teacher={plain}")
    assert (
        "pruned after 0 steps: 1 of 4 key/value heads and 64 of 256 feed-forward" in done.stdout + done.stderr
    )
    prune(Prune(checkpoint=str(plain), output=str(tmp_path / "small"), ratio=0.25, criterion="l2_norm"))
    report = json.loads((tmp_path / "small" / REPORT_FILE).read_text())
    trained = open_checkpoint(tmp_path / "run/epoch_0_step_4")
    for layer, left in enumerate(report["layers"]):
        assert sorted(left["groups"] + gone(trained, layer, "attention")) == list(range(4))
        assert sorted(left["units"] + gone(trained, layer, "mlp")) == list(range(256))


def test_a_run_that_was_not_pruned_is_when_it_goes_on(tool: Tool, plain: Path, tmp_path: Path) -> None:
    start = f"{CKPT}={plain}/epoch_0_step_2"
    done = tool.ok(tmp_path / "run", *SHORT, ON, f"{KEY}part=mlp", start)
    assert (
        "pruned after 2 steps: 0 of 4 key/value heads and 32 of 256 feed-forward" in done.stdout + done.stderr
    )
    assert "--ratio 0.125 --criterion l1_norm --part mlp --output" in done.stdout + done.stderr
    assert len(gone(open_checkpoint(tmp_path / "run/epoch_0_step_4"), 1, "mlp")) == 32
