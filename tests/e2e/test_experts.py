"""A mixture of experts through the tools: trained, resumed bit for bit, evaluated, and its loads recorded."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.checkpoint.reader import open_checkpoint
from tests.e2e.conftest import FOUR_STEPS, NANO, Tool, losses, records
from tests.helpers import programs

CONFIG = NANO.with_name("gpt_moe_nano.yaml")
BALANCED = (
    "Model.moe.router.bias=True",
    "Model.moe.bias_update_rate=1e-4",
    "Model.moe.aux_loss.kind=switch",
    "Model.moe.layers=[1]",
)
ROUTER = "decoder.layers.1.mlp.router"


@pytest.fixture(scope="module")
def trained(tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("experts") / "run"
    done = tool.ok(output_dir, *FOUR_STEPS, *BALANCED, config=CONFIG)
    assert "metrics at global step 4, balance_loss: " in done.stdout
    return output_dir


def test_loads_and_losses_are_recorded(trained: Path) -> None:
    for record in records(trained, "train"):
        metrics = record["metrics"]
        assert metrics.keys() == {"balance_loss", "z_loss", "router_entropy", "expert_load", "expert_load/1"}
        assert 1 <= metrics["expert_load/1"] <= 4 and 0 < metrics["router_entropy"] <= np.log(8) + 1e-6


def test_a_resumed_run_goes_on_bit_for_bit(tool: Tool, trained: Path, tmp_path: Path) -> None:
    middle = open_checkpoint(trained / "epoch_0_step_2")
    bias, load = (np.asarray(middle.read(f"{ROUTER}.{name}")) for name in ("bias", "load"))
    assert 0 < np.abs(bias).max() <= 2.01e-4
    assert load.sum() == pytest.approx(1.0, rel=1e-6) and load.std() > 0
    start = f"Engine.save_load.ckpt_dir={middle.path}"
    tool.ok(tmp_path / "again", *FOUR_STEPS, *BALANCED, start, config=CONFIG)
    assert losses(tmp_path / "again") == losses(trained)[2:]


def test_another_choice_of_experts_is_another_network(tool: Tool, trained: Path, tmp_path: Path) -> None:
    keys = (*BALANCED, f"Engine.save_load.ckpt_dir={trained}")
    evaluation = {"script": "tools/eval.py", "config": CONFIG}
    tool.ok(tmp_path, *keys, "Model.moe.z_loss_weight=0", **evaluation)
    for changed in ("Model.moe.top_k=1", "Model.moe.router.normalize=False"):
        assert "Model.moe" in tool.refused(tmp_path, *keys, changed, **evaluation)


def test_another_balancing_loss_may_follow(tool: Tool, trained: Path, tmp_path: Path) -> None:
    """One that counts by sequences has no shares of the step before, and the other way round."""
    others = (*BALANCED[:2], BALANCED[3], *FOUR_STEPS)
    start, kind = "Engine.save_load.init_from", "Model.moe.aux_loss.kind"
    tool.ok(tmp_path / "one", *others, f"{kind}=sequence", f"{start}={trained}", config=CONFIG)
    tool.ok(tmp_path / "two", *others, f"{kind}=switch", f"{start}={tmp_path / 'one'}", config=CONFIG)


def test_experts_are_stored_in_few_bits(tool: Tool, trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ppfleetx", "quantize", str(trained), "--to", "int8"]
    smooth = ("--smooth", "--calibration", "x", "--output", "y")
    assert "--smooth" in programs.refused([*command, *smooth], cwd=tmp_path)
    small = tmp_path / "small"
    programs.ok([*command, "--output", small])
    keys, evaluation = BALANCED, {"script": "tools/eval.py", "config": CONFIG}
    whole = tool.ok(tmp_path / "a", *keys, f"Engine.save_load.ckpt_dir={trained}", **evaluation)
    form = [f"Compress.Weights.{key}" for key in ("bits=8", "group_size=32", "asymmetric=True")]
    few = tool.ok(tmp_path / "b", *keys, *form, f"Engine.save_load.ckpt_dir={small}", **evaluation)
    losses_of = [float(re.search(r"loss: ([\d.]+)", one.stdout)[1]) for one in (whole, few)]
    assert losses_of[0] != losses_of[1] and losses_of[1] == pytest.approx(losses_of[0], rel=0.01)
