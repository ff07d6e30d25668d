"""Each fused operator of the table against its composite, in each type that it is used with."""

import pytest

from ppfleetx.nn.fused_ops import TABLE
from tests.device.test_precision import SMALL, TOLERANCE, run
from tests.parity.comparison import apart

pytestmark = pytest.mark.device

ROWS = [(name, dtype) for name, row in TABLE.items() for dtype in row.types]


@pytest.mark.parametrize(("name", "dtype"), ROWS)
def test_an_operator_gives_what_its_composite_gives(alone, need_type, here, name, dtype):
    need_type(dtype)
    found = alone("fused:judge", name=name, dtype=dtype, device=here.device)
    if here.is_reference and found["lacks"]:
        pytest.skip(f"the reference device has no kernel {found['lacks']} for {dtype}")
    if found["unfit"]:
        pytest.skip(f"flash attention: {found['unfit']}")
    assert found["said"] == "", "Model.fused_ops: auto leaves it out on this card"


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_training_is_the_same_without_them(alone, device, record_property, model):
    with_them, without = (
        run(alone, device, model, **{"Model.fused_ops": setting})["loss"] for setting in ("auto", "none")
    )
    found = apart(with_them, without)
    record_property("loss", found)
    assert found <= TOLERANCE["float32"]


def test_operators_of_a_plugin_are_tried_and_taken(alone, need_type, device, here, record_property):
    if not here.is_reference:
        pytest.skip("a card has operators of its own")
    need_type("bfloat16")
    sizes = {**SMALL, "Model.head_dim": 64}
    options = {"mix_precision": {"dtype": "bfloat16", "level": "O2"}, "steps": 3}
    arguments = {"plan": {}, "world_size": 1, "model": "llama", "optimizer": "adamw", "micro_batch_size": 8}
    with_them, without = (
        alone(case, **arguments, **options, extra={**sizes, "Global.device": device})
        for case in ("fused:train_with_a_plugin", "training:train_in_16_bits")
    )
    types = ["float32", "bfloat16"]
    assert with_them["taken"] == {"rms_norm": types, "rope": types, "plugin_attention": ["bfloat16"]}
    assert with_them["error"] == ""
    found = apart(with_them["loss"], without["loss"])
    record_property("loss", found)
    assert 0 < found <= TOLERANCE["bfloat16"]
