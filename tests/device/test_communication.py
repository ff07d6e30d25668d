"""Each collective of two cards and more, in each type that the program sends."""

import pytest

from tests.device.place import place

pytestmark = pytest.mark.device

TYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8")
SIZES = place().sizes(start=2) or [2]


@pytest.mark.parametrize("shape", [[4, 3], [64, 1024]], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_collective(together, need_cards, device, size, dtype, shape):
    need_cards(size)
    assert (
        together(size, "communication:every_collective", device=device, dtype=dtype, shape=shape)
        == [size] * size
    )


@pytest.mark.parametrize("size", [size for size in SIZES if size > 2] or [4])
def test_a_group_of_some_of_the_ranks(together, need_cards, device, size):
    need_cards(size)
    members = list(range(1, size))
    found = together(size, "communication:within_a_group", device=device, members=members, dtype="float32")
    assert found == [[1.0] * 3] + [[float(sum(range(2, size + 1)))] * 3] * len(members)


@pytest.mark.parametrize("route", ["any", "one expert"])
@pytest.mark.parametrize(("ep", "emp"), [(2, 1), (1, 2), (2, 2)])
def test_rows_of_experts(together, need_cards, device, ep, emp, route):
    need_cards(ep * emp)
    found = together(ep * emp, "communication:rows_of_experts", device=device, ep=ep, emp=emp, route=route)
    assert max(found) < 1e-4


def test_a_strided_tensor_is_refused(together, need_cards, here, record_property):
    """What must not be is a wrong sum."""
    need_cards(2)
    found = together(2, "communication:strided", device=here.device)
    record_property("what was said", found[0])
    assert all(one.startswith("refused") or one == "[0.0, 6.0]" for one in found)
    if here.has_gpu:
        assert all(one.startswith("refused") for one in found)
