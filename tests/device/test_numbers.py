"""Each operator on the card against the CPU's float32 kernels, forward and backward."""

import pytest

from ppfleetx.config.registries import ACTIVATIONS, NORMS

pytestmark = pytest.mark.device

TYPES = ("float32", "float16", "bfloat16")
# Of tests/device/cases/numbers.py, told without Paddle. A new norm or activation is here by itself.
OPERATORS = (
    *("linear", "linear without bias", "embedding", "rope", "attention", "loss"),
    *(f"norm {name}" for name in NORMS.names()),
    *(f"activation {name}" for name in ACTIVATIONS.names()),
)
# Of the largest element. float32: sums in another order. 16 bits: some steps of the type, 2^-11 and 2^-8, as
# the result is rounded once and what is inside may be, too.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_the_cpu_gives(alone, need_type, device, record_property, name, dtype):
    need_type(dtype)
    found = alone("numbers:compare", name=name, dtype=dtype, device=device)
    record_property("worst", max(found.values()))
    assert max(found.values()) <= TOLERANCE[dtype], found


@pytest.mark.parametrize("name", OPERATORS)
def test_a_strided_input_gives_the_same(alone, device, record_property, name):
    found = alone("numbers:compare", name=name, dtype="float32", device=device, noncontiguous=True)
    record_property("worst", max(found.values()))
    assert max(found.values()) <= TOLERANCE["float32"], found


def test_float32_is_exact_unless_tf32_is_allowed(alone, here, record_property):
    exact = alone("repeats:matmul_error", device=here.device, tf32=False)
    allowed = alone("repeats:matmul_error", device=here.device, tf32=True)
    record_property("exact", exact)
    record_property("with TF32", allowed)
    assert exact <= 1e-5
    assert allowed <= 1e-2


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "as it comes"])
@pytest.mark.parametrize("what", ["embedding", "flash"])
def test_the_same_gradient_each_time(alone, device, record_property, what, deterministic):
    found = alone("repeats:repeated", what=what, device=device, deterministic=deterministic)
    record_property("equal", found["equal"])
    record_property("difference", found["difference"])
    assert found["equal"] or not deterministic, "the flags of docs/gpu.md do not make it repeat"


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_step_reads_no_more_from_the_card_than_from_the_cpu(alone, here, record_property, model):
    """A read waits for all that the card has been given to do. Plugins' devices need one more, for the
    numbers of the step before, as there is no pinned memory."""
    run = {"plan": {}, "world_size": 1, "model": model, "optimizer": "adamw", "micro_batch_size": 4}
    on_device, on_cpu = (
        alone("repeats:reads_of_a_step", device=where, extra={}, **run) for where in (here.device, "cpu")
    )
    record_property("reads", on_device["reads"])
    record_property("by place", on_device["by place"])
    record_property("seconds", on_device["seconds"])
    more = 0 if here.has_gpu else 1
    assert on_device["reads"] <= on_cpu["reads"] + more, (on_device, on_cpu)
