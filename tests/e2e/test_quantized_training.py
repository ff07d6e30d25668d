"""Quantization-aware training through the tools: from plain weights, resumed bit for bit, evaluated, adapted;
and refused in words where scales are missing or have no place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.config.sections.compress import is_of_quantizer
from tests.e2e.conftest import FOUR_STEPS, Tool, losses

QAT = "Compress.Quantization.enable=True"
SHORT = FOUR_STEPS
INIT, CKPT = "Engine.save_load.init_from", "Engine.save_load.ckpt_dir"


@pytest.fixture(scope="module")
def quantized(tool: Tool, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory of four steps of training with rounding, from the plain model."""
    output_dir = tmp_path_factory.mktemp("quantized") / "run"
    tool.ok(output_dir, *SHORT, QAT, f"{INIT}={plain}", "Compress.Quantization.moving_rate=0.5")
    return output_dir


def test_scales_are_saved_and_a_resumed_run_goes_on_bit_for_bit(
    tool: Tool, quantized: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(quantized / "epoch_0_step_2")
    scales = [name for name in checkpoint.names() if is_of_quantizer(name)]
    assert scales and all(checkpoint.read(name).item() > 0 for name in scales)
    assert "enable: true" in (checkpoint.document("config.yaml") or b"").decode()
    output_dir = tmp_path / "again"
    same = (QAT, "Compress.Quantization.moving_rate=0.5")
    tool.ok(output_dir, *SHORT, *same, f"{CKPT}={checkpoint.path}")
    assert losses(output_dir) == losses(quantized)[2:]


def test_evaluation_uses_the_scales_and_needs_their_section(
    tool: Tool, quantized: Path, tmp_path: Path
) -> None:
    def loss(*more: str) -> float:
        done = tool.ok(tmp_path / "out", ckpt, *more, script="tools/eval.py")
        return float(re.search(r"loss: ([\d.]+)", done.stdout + done.stderr)[1])

    ckpt = f"{CKPT}={quantized}"
    refused = tool.refused(tmp_path / "out", ckpt, script="tools/eval.py")
    assert "Compress.Quantization: give that section" in refused
    rounded, plain = loss(QAT), loss("Engine.save_load.allow_extra=True")
    assert rounded != plain
    assert rounded == pytest.approx(plain, rel=0.05)


def test_adapters_stand_on_a_quantized_base(tool: Tool, plain: Path, quantized: Path, tmp_path: Path) -> None:
    lora = (QAT, "Model.lora.rank=4", "Optimizer.lr.max_lr=1e-2")
    tool.ok(tmp_path / "lora", *SHORT, *lora, f"Model.lora.base={quantized}")
    trained = open_checkpoint(tmp_path / "lora/epoch_0_step_4").names()
    assert trained and all(".lora." in name for name in trained), "scales stay those of the base"
    refused = tool.refused(tmp_path / "other", *SHORT, *lora, f"Model.lora.base={plain}")
    assert "was not trained with Compress.Quantization" in refused
    refused = tool.refused(tmp_path / "third", *SHORT, "Model.lora.rank=4", f"Model.lora.base={quantized}")
    assert "give that section" in refused


def test_plain_weights_are_no_quantized_run(tool: Tool, plain: Path, tmp_path: Path) -> None:
    refused = tool.refused(tmp_path / "resumed", *SHORT, QAT, f"{CKPT}={plain}/epoch_0_step_2")
    assert "has no scales of its layers' inputs" in refused
    assert INIT in refused
