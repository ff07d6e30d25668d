"""The device finds races: what orders streams is taken out of the program, one thing at a time.

``tests/device/cases/races.py`` lists the changes. Without a change the numbers are the same to the
bit, whatever the order of events.
"""

import functools

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.device.reference import NAME, environment, obstacle
from tests.helpers.ranks import Pools, fields_of
from tests.parity.comparison import micro_batch_size_of

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]
SEEDS = range(20)
DELAYS = {"collective_delay_us": 4_000, "copy_delay_us": 3_000, "late_reads": 1}
SLOW = {**DELAYS, "collective_delay_us": 30_000}
AT_THE_END = {"Distributed.sharding.reduce_overlap": False, "Distributed.sharding.broadcast_overlap": False}
SINGLY = {"Distributed.bucket_size": 0.001}
SUMS = {"Distributed.mp_async_allreduce": True}
SCATTERED = {"Distributed.sp_async_reduce_scatter": True, "Distributed.recompute_allgather": True}
MESSAGES = {"Distributed.overlap_p2p_comm": True}
ONE, TWO, THREE = (Plan(sharding=2, sharding_stage=stage) for stage in (1, 2, 3))
OFFLOAD = Plan(sharding=2, sharding_stage=2, sharding_offload=True)
SEQUENCES = Plan(mp=2, sequence_parallel=True)
FOUND = [
    ("no wait in BucketSums._complete", Plan(dp=2), {}, DELAYS),
    ("no wait in Sharding._complete", TWO, {}, DELAYS),
    ("no wait in Receive.wait", Plan(pp=2), MESSAGES, DELAYS),
    ("no wait in Receive.wait", Plan(pp=2, pp_schedule="zb_h1"), {}, DELAYS),
    ("no wait in ParamBroadcast.finish", ONE, SINGLY, DELAYS),
    ("no wait in ParamBroadcast._before_forward", ONE, SINGLY, SLOW),
    ("no wait in _Fetch.complete", THREE, {}, DELAYS),
    ("no wait in _finish.<locals>.finish", Plan(mp=2), SUMS, DELAYS),
    ("no wait in _finish.<locals>.finish", SEQUENCES, SCATTERED, DELAYS),
    ("no wait in Packed.complete", Plan(dp=2), AT_THE_END, DELAYS),
    ("values are read before they have come", ONE, SINGLY, DELAYS),
    ("a copy to the host is read at once", Plan(dp=2), {}, DELAYS),
    ("the source of a copy is let go", Plan(dp=2), {}, DELAYS),
    ("offload does not wait for gradients", OFFLOAD, {}, DELAYS),
    ("sum_gathered does not wait", Plan(dp=2), {}, DELAYS),
    ("all-to-all does not wait", Plan(sep=2), {}, DELAYS),
    ("one group, two orders", Plan(dp=2), AT_THE_END, DELAYS),
    ("two groups, two orders", Plan(dp=2, mp=2), AT_THE_END, DELAYS),
]
HARMLESS = [
    ("no wait in ListedPipeline._complete", Plan(pp=2), MESSAGES, DELAYS),
    ("what is sent is let go", Plan(pp=2), MESSAGES, DELAYS),
    ("what is summed is let go", SEQUENCES, SCATTERED, DELAYS),
]


@pytest.fixture(scope="module")
def pools():
    with Pools(device=NAME, **environment(poison=1, timeout_s=10)) as pools:
        yield pools


@pytest.fixture(scope="module")
def run(pools):
    """``run(change, plan, extra, seed, delays)``: numbers by rank; None where a rank ended in an error."""

    def run(change, plan, extra, seed, delays):
        outcomes = pools(plan.world_size).call(
            "tests.device.cases.races:train",
            change=change,
            options={"seed": seed, **delays},
            plan=fields_of(plan),
            world_size=plan.world_size,
            micro_batch_size=micro_batch_size_of(plan),
            extra={"Global.device": NAME, "Model.num_layers": 4, **extra},
        )
        if any(outcome.error or outcome.died for outcome in outcomes):
            assert change != "nothing", outcomes
            return None
        assert all(outcome.value["reached"] for outcome in outcomes), f"{change}: not come to"
        return [outcome.value["numbers"] for outcome in outcomes]

    return run


@pytest.fixture(scope="module")
def right(run):
    """``right(plan, extra)``: numbers without any delay."""
    known = functools.cache(lambda plan, extra: run("nothing", plan, dict(extra), 0, {}))
    return lambda plan, extra: known(plan, tuple(extra.items()))


def _id(row):
    change, plan, extra, _ = row
    return f"{change}: {plan}{' '.join(['', *extra])}"


def _changes(rows):
    """Cases of these rows."""
    cases = [pytest.param(*row, id=_id(row)) for row in rows]
    return pytest.mark.parametrize(("change", "plan", "extra", "delays"), cases)


@_changes(FOUND)
def test_found(run, right, record_property, change, plan, extra, delays):
    expected = right(plan, extra)
    found = next((seed for seed in SEEDS if run(change, plan, extra, seed, delays) != expected), None)
    record_property("seed", found)
    assert found is not None


@_changes(HARMLESS)
def test_harmless(run, right, change, plan, extra, delays):
    expected = right(plan, extra)
    assert [seed for seed in SEEDS if run(change, plan, extra, seed, delays) != expected] == []


@pytest.mark.parametrize(
    ("plan", "extra"),
    [
        pytest.param(plan, extra, id=f"{plan}{' '.join(['', *extra])}")
        for plan, extra in {(_id(("", *row[1:]))): row[1:3] for row in FOUND}.values()
    ],
)
def test_the_program_as_it_is(run, right, plan, extra):
    expected = right(plan, extra)
    late = {**DELAYS, "kernel_delay_us": 200}
    assert [seed for seed in SEEDS if run("nothing", plan, extra, seed, late) != expected] == []
