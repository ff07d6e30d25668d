"""Paddle's own fleet on the CPU process groups: each plan gives the losses of the serial run."""

import functools

import pytest

TRAIN = "tests.distributed.plans:train"
TOLERANCE = 1e-6  # relative, float32; measured 1.1e-7 at most: one unit in the last place of the loss

PLANS = {
    "dp2": {"dp": 2},
    "dp2, accumulated": {"dp": 2, "accumulate": 2},
    "dp2, recompute": {"dp": 2, "recompute": True},
    "mp2": {"mp": 2},
    "mp2, recompute": {"mp": 2, "recompute": True},
    "mp2, sequence parallel": {"mp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2, "accumulate": 4},
    "sharding2 stage 1": {"sharding": 2},
    "sharding2 stage 1, split": {"sharding": 2, "split_param": True},
    "sharding2 stage 2": {"sharding": 2, "stage": 2},
    "sharding2 stage 3": {"sharding": 2, "stage": 3},
    "mp4": {"mp": 4},
    "dp2 mp2": {"dp": 2, "mp": 2},
    "dp2 sharding2": {"dp": 2, "sharding": 2},
    "sharding2 mp2, split": {"sharding": 2, "mp": 2, "split_param": True},
    "sharding2 pp2, split": {"sharding": 2, "pp": 2, "accumulate": 2, "split_param": True},
    "mp2 pp2, sequence parallel": {"mp": 2, "pp": 2, "accumulate": 2, "sequence_parallel": True},
    "pp4, virtual 2": {"pp": 4, "virtual": 2, "layers": 8, "accumulate": 4},
    "dp2 pp2, dp overlap": {"dp": 2, "pp": 2, "accumulate": 2, "tied": False, "overlap": "dp_comm_overlap"},
    "sharding2 pp2, overlap": {
        "sharding": 2,
        "pp": 2,
        "accumulate": 2,
        "tied": False,
        "split_param": True,
        "overlap": "sharding_comm_overlap",
    },
    "sharding2, split, overlap": {"sharding": 2, "split_param": True, "overlap": "comm_overlap"},
    "pp4, virtual 2, p2p overlap": {
        "pp": 4,
        "virtual": 2,
        "layers": 8,
        "accumulate": 8,
        "overlap": "overlap_p2p_comm",
    },
    "dp2 sharding2 stage 2": {"dp": 2, "sharding": 2, "stage": 2},
    "dp2 mp2 pp2": {"dp": 2, "mp": 2, "pp": 2, "accumulate": 2},
    "dp2 mp2 pp2, recompute": {"dp": 2, "mp": 2, "pp": 2, "accumulate": 2, "recompute": True},
}


@functools.cache
def serial(ranks, layers: int, tied: bool = True) -> list[float]:
    return ranks(1).run(TRAIN, layers=layers, tied=tied)[0]["losses"]


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
    expected = serial(ranks, PLANS[name].get("layers", 2), PLANS[name].get("tied", True))
    assert expected[-1] < expected[0]
    assert losses_of(ranks, PLANS[name]) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("split_param", [False, True])
def test_paddle_still_counts_the_tied_gradient_twice(ranks, split_param):
    """Fails when Paddle marks shared parameters itself: then ``is_firstly_shared`` need not be set."""
    plan = {"pp": 2, "accumulate": 2, "mark_shared": False}
    if split_param:
        plan |= {"sharding": 2, "split_param": True}
    losses, expected = losses_of(ranks, plan), serial(ranks, 2)
    assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) > 2e-5


def test_paddle_still_gathers_a_row_parallel_input_gradient_on_the_wrong_axis(ranks):
    """Fails when RowParallelLinear(input_is_parallel=False) may be used."""
    assert ranks(2).run("tests.distributed.plans:row_parallel_gradient_is_wrong") == [True, True]


def test_data_parallel_traffic_is_one_all_reduce_of_the_gradients(ranks):
    parameters = 64 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    for result in ranks(2).run(TRAIN, dp=2, steps=3):
        assert result["traffic"]["dp"]["all_reduce"]["payload"] == 3 * 4 * parameters
