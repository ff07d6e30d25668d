"""Paddle's own fleet on the CPU process groups: each plan gives the losses of the serial run."""

import functools

import pytest

TRAIN = "tests.distributed.cpu.plans:train"
TOLERANCE = 1e-6  # relative, float32; measured 1.1e-7 at most: one unit in the last place of the loss

PLANS = {
    "mp2": {"mp": 2},
    "mp2, recompute": {"mp": 2, "recompute": True},
    "mp2, sequence parallel": {"mp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2, "accumulate": 4},
    "sharding2": {"sharding": 2},
    "mp4": {"mp": 4},
    "dp2 mp2": {"dp": 2, "mp": 2},
    "dp2 sharding2": {"dp": 2, "sharding": 2},
    "mp2 pp2, sequence parallel": {"mp": 2, "pp": 2, "accumulate": 2, "sequence_parallel": True},
    "pp4, virtual 2": {"pp": 4, "virtual": 2, "layers": 8, "accumulate": 4},
    "pp4, virtual 2, p2p overlap": {
        "pp": 4,
        "virtual": 2,
        "layers": 8,
        "accumulate": 8,
        "p2p_overlap": True,
    },
    "dp2 mp2 pp2": {"dp": 2, "mp": 2, "pp": 2, "accumulate": 2},
}


@functools.cache
def serial(ranks, layers: int) -> list[float]:
    return ranks(1).run(TRAIN, layers=layers)[0]["losses"]


def world(plan: dict) -> int:
    return plan.get("dp", 1) * plan.get("mp", 1) * plan.get("pp", 1) * plan.get("sharding", 1)


def losses_of(ranks, plan: dict) -> list[float]:
    """Means over the data ranks."""
    results = ranks(world(plan)).run(TRAIN, **plan)
    by_data_rank = {result["data_rank"]: result["losses"] for result in results}
    assert len(by_data_rank) == plan.get("dp", 1) * plan.get("sharding", 1)
    return [sum(losses) / len(by_data_rank) for losses in zip(*by_data_rank.values(), strict=True)]


@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_serial(ranks, name):
    expected = serial(ranks, PLANS[name].get("layers", 2))
    assert expected[-1] < expected[0]
    assert losses_of(ranks, PLANS[name]) == pytest.approx(expected, rel=TOLERANCE)


def test_paddle_still_counts_the_tied_gradient_twice(ranks):
    """Fails when Paddle marks shared parameters itself: then ``is_firstly_shared`` need not be set."""
    losses = losses_of(ranks, {"pp": 2, "accumulate": 2, "mark_shared": False})
    expected = serial(ranks, 2)
    assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) > 2e-5
