"""Short trainings on one card against the CPU's float32, in each type and with each recomputation."""

import pytest

from tests.parity.comparison import apart

pytestmark = pytest.mark.device

SMALL = {"Model.num_layers": 2, "Model.head_dim": 8}  # heads that flash attention serves
RECOMPUTED = {
    "kept": {},
    **{
        granularity: {"Model.use_recompute": True, "Model.recompute_granularity": granularity}
        for granularity in ("full", "full_attn", "core_attn")
    },
}
# Relative, of each loss: float32 sums in another order; 16 bits round each operand (2^-8 and 2^-11), and the
# loss is a mean over many of them.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture
def cpu_losses(alone):
    """Losses of the CPU in float32."""
    return lambda model, **more: run(alone, "cpu", model, **more)["loss"]


def run(alone, device, model, mix_precision=None, **extra):
    """Results of a short training of one card."""
    arguments = {
        "plan": {},
        "world_size": 1,
        "model": model,
        "optimizer": "adamw",
        "micro_batch_size": 8,
        "steps": 3,
        "extra": {**SMALL, **extra, "Global.device": device},
    }
    if mix_precision is None:
        return alone("training:train", weights_dir=None, **arguments)
    return alone("training:train_in_16_bits", mix_precision=mix_precision, **arguments)


@pytest.mark.parametrize("recomputed", RECOMPUTED)
@pytest.mark.parametrize("model", ["gpt", "llama", "mixed"])
def test_float32(alone, device, cpu_losses, record_property, model, recomputed):
    found = apart(run(alone, device, model, **RECOMPUTED[recomputed])["loss"], cpu_losses(model))
    record_property("loss", found)
    assert found <= TOLERANCE["float32"]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("recomputed", ["kept", "full", "core_attn"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_16_bits(alone, need_type, device, cpu_losses, record_property, model, dtype, level, recomputed):
    need_type(dtype)
    options = {"dtype": dtype, "level": level}
    result = run(alone, device, model, mix_precision=options, **RECOMPUTED[recomputed])
    assert result["error"] == "" and result["misrounded"] == [] and result["inexact_masters"] == []
    expected = cpu_losses(model)[1:]  # that run evaluates before it begins, too
    found = apart(result["loss"], expected)
    record_property("loss", found)
    assert found <= TOLERANCE[dtype]


def test_an_overflow_is_skipped_and_halves_the_scale(alone, need_type, device):
    need_type("float16")
    options = {"dtype": "float16", "scale_loss": 2.0**30, "hysteresis": 1}
    result = run(alone, device, "gpt", mix_precision=options)
    assert result["skipped"][0] and result["scale"][:2] == [2.0**30, 2.0**29]
    assert result["digest"][0] == result["digest"][1], "a skipped step changed a state"


def test_logits_in_pieces_give_the_same(alone, device, cpu_losses, record_property):
    found = apart(run(alone, device, "gpt", **{"Model.loss_chunks": 4})["loss"], cpu_losses("gpt"))
    record_property("loss", found)
    assert found <= TOLERANCE["float32"]
