"""TFLOP/s and MFU of a run's steps."""

from __future__ import annotations

import pytest

from ppfleetx.config.loader import load_config
from ppfleetx.planner.cards import card_of_device, load_card
from ppfleetx.planner.mfu import model_flops_utilization, run_utilization

GPT = "ppfleetx/configs/nlp/gpt/pretrain_gpt_345M_single_card.yaml"
# 345M: h 1024, 24 layers, f 4096, vocabulary 50304 padded to 128; 8 sequences of 1024.
TOKENS, HIDDEN, LAYERS, VOCAB, LENGTH = 8 * 1024, 1024, 24, 50304, 1024


def rates(*overrides: str, device: str = "gpu", name: str = "", seconds: float = 2.0) -> dict[str, float]:
    return run_utilization(load_config(GPT, overrides), device, name).rates(seconds)


def test_the_hand_computation() -> None:
    """Matrices: 12 h^2 a layer and h V of the head, 6 FLOPs a parameter and token; attention: QK^T and PV,
    2 x 2 s h FLOPs a token and layer forward, three times that with the backward pass."""
    matrices = 6 * TOKENS * (12 * HIDDEN**2 * LAYERS + HIDDEN * VOCAB)
    attention = 3 * 4 * LENGTH * HIDDEN * TOKENS * LAYERS
    full, causal = matrices + attention, matrices + attention / 2
    forward_of_layers = (full - 6 * TOKENS * HIDDEN * VOCAB) / 3
    found = rates("Global.peak_tflops=100")
    assert found["tflops_per_device"] == pytest.approx(full / 2 / 1e12, rel=1e-12)
    assert found["tflops_per_device_causal"] == pytest.approx(causal / 2 / 1e12, rel=1e-12)
    assert found["mfu"] == pytest.approx(full / 2 / 100e12, rel=1e-12)
    assert found["mfu_causal"] == pytest.approx(causal / 2 / 100e12, rel=1e-12)
    assert found["hfu"] == found["mfu"], "nothing is computed twice"
    again = rates("Global.peak_tflops=100", "Model.use_recompute=True", "Model.recompute_granularity=full")
    assert again["mfu"] == found["mfu"]
    assert again["hfu"] == pytest.approx((full + forward_of_layers) / 2 / 100e12, rel=1e-12)


def test_the_peak_is_that_of_the_card() -> None:
    half = ["Engine.mix_precision.enable=True", "Engine.mix_precision.dtype=bfloat16"]
    named = run_utilization(load_config(GPT, ["Global.card=A100-80GB", *half]), "gpu")
    card = load_card("A100-80GB")
    assert named.rates(0.7)["mfu"] == pytest.approx(model_flops_utilization(named.job, 0.7, card), rel=1e-12)
    assert "peak of a device 312 TFLOP/s (A100-80GB, bfloat16)" in named.describe()
    assert rates(*half, "Global.card=null", name="NVIDIA A100-SXM4-40GB") == named.rates(2.0)
    single = ["Engine.mix_precision.enable=False", "Global.card=A100-80GB"]
    exact, rounded = (rates(*single, f"Global.allow_tf32={on}") for on in (False, True))
    assert exact["mfu"] / rounded["mfu"] == pytest.approx(156 / 19.5)
    assert "mfu" not in rates("Global.card=V100-32GB", *half), "it has no bfloat16"
    unknown = rates("Global.card=null")
    assert "mfu" not in unknown and unknown["tflops_per_device"] > 0


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 NVL", "H100-80GB"),
        ("CPU", None),
    ],
)
def test_the_card_has_the_memory_that_the_devices_name_says(device: str, card: str | None) -> None:
    assert card_of_device(device) == card


def test_where_operations_are_not_known() -> None:
    cfg = load_config(GPT, ["Model.lora.rank=8"])
    assert run_utilization(cfg, "gpu") is None
    assert run_utilization(load_config(GPT, ["Data.Train=null"]), "gpu") is None
