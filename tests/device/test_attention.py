"""Flash attention against the reference, wherever the card can run it; and words where it cannot."""

import pytest

from tests.device.test_numbers import TOLERANCE

pytestmark = pytest.mark.device

CASES = [  # head size, key/value heads, query heads for each, packed documents
    (8, 4, 1, False),
    (64, 4, 1, False),
    (64, 2, 4, True),
    (80, 2, 1, True),
    (96, 1, 8, False),
    (128, 2, 2, True),
    (128, 4, 1, False),
    (192, 2, 1, False),
    (256, 2, 1, True),
    (60, 2, 1, False),  # refused: no multiple of 8
    (264, 1, 1, False),  # refused: too large
]


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_gives_what_the_reference_gives(alone, need_type, here, record_property, case, dtype, trains):
    need_type(dtype)
    sizes = dict(zip(("head_size", "groups", "per_group", "packed"), case, strict=True))
    found = alone("attention:compare", device=here.device, dtype=dtype, trains=trains, **sizes)
    record_property("obstacle", found["obstacle"])
    record_property("worst", max(found["differences"].values()))
    assert max(found["differences"].values()) <= TOLERANCE[dtype], found
    assert found["refused"] == bool(found["obstacle"]), "flash is asked for and neither runs nor is refused"
    if here.has_gpu and (case[0] % 8 or case[0] > 256):
        assert found["obstacle"]


def test_dropped_weights_leave_their_expectation(alone, here, record_property):
    """Version 2 keeps floor(255 (1 - p)) of 255 weights, 0.2 % too few at p = 0.1."""
    dtype = "float16" if here.has_gpu else "float32"
    found = alone("attention:dropped", device=here.device, dtype=dtype, probability=0.1)
    record_property("flash", found["flash"])
    record_property("mean", found["mean"])
    assert 0.97 <= found["mean"] <= 1.03
    assert found["same seed"] == 0.0, "the same seed drops other weights"
    assert found["other seed"] > 0.0
