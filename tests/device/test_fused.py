"""Each fused operator of the table against its composite, in each type that it is used with."""

import pytest

from ppfleetx.nn.fused import TABLE
from tests.device.test_precision import TOLERANCE, apart, run

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
