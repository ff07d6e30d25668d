"""Memory that ends, and a card that fails: one sentence, and what was saved before is whole."""

from __future__ import annotations

import functools

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.device.place import place
from tests.device.reference import NAME, environment
from tests.e2e.program import losses, values_of
from tests.helpers.ranks import Pools

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not place().is_reference, reason="memory is taken away from the reference device"),
]
STEPS, SAVED = 4, 2
PLANS = [Plan(), Plan(sharding=2, sharding_stage=3)]
LEAST_BYTES = 1024


@pytest.fixture(scope="module")
def train(corpus):
    """``train(plan, directory, target, **arguments)``: results by rank. Each tensor is its own allocation."""

    def run(plan, directory, target="training:program", overrides=None, **arguments):
        own = {
            "Model.num_layers": 4,
            "Engine.max_steps": STEPS,
            "Engine.eval_freq": 3,
            "Engine.save_load.save_steps": SAVED,
            "Global.device": NAME,
        }
        values = values_of(plan, corpus, directory, overrides={**own, **(overrides or {})})
        pool = pools(plan.world_size)
        ended = pool.call(f"tests.device.cases.{target}", values=values, world=plan.world_size, **arguments)
        if arguments:  # its processes are to end with it, as those of a run do
            pool.kill()
        return ended

    with Pools(device=NAME, **environment(poison=1, timeout_s=5)) as pools:
        yield run


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """``whole(plan)``: the numbers of an undisturbed run."""

    @functools.cache
    def numbers(plan):
        directory = tmp_path_factory.mktemp("whole")
        train(plan, directory)
        return losses(directory)

    return numbers


MOMENTS = [
    # moment, its call, what the sentence says of the place, steps done before
    ("start", 1, "starting", 0),
    ("forward", 3, "in its step, step 3", 2),
    ("backward", 5, "in its step, step 3", 2),
    ("optimizer", 1, "in its step, step 1", 0),
    ("evaluation", 3, "evaluating, step 3", 3),
]


@pytest.mark.parametrize(("moment", "call", "said", "done"), MOMENTS, ids=[one[0] for one in MOMENTS])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_memory_that_ends_is_one_message_and_nothing_is_lost(
    train, whole, tmp_path, record_property, plan, moment, call, said, done
):
    ended = train(plan, tmp_path, "faults:train_until", moment=moment, call=call, leaves=LEAST_BYTES)
    found = [one.value for one in ended if one.value and one.value["name"]]
    record_property("said", [one["said"] for one in found])
    assert found, [one.error for one in ended]
    for one in found:
        first, *rest = one["said"].splitlines()
        assert one["name"] == "OutOfMemoryError" and first.startswith("out of memory (") and said in first
        assert rest, "what would need less"
    assert sorted(path.name for path in tmp_path.glob("epoch_*")) == (
        [f"epoch_0_step_{SAVED}"] if done >= SAVED else []
    )
    resumed = train(plan, tmp_path, overrides={"Engine.save_load.resume": "auto"})
    assert [one.error for one in resumed] == [None] * plan.world_size
    assert {step: rest for step, *rest in losses(tmp_path)} == {step: rest for step, *rest in whole(plan)}


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("beside", [False, True], ids=["waits", "beside"])
def test_a_save_needs_no_memory_of_the_card_or_says_so(train, tmp_path, plan, beside):
    """A save that finds none leaves no checkpoint that looks whole."""
    overrides = {"Engine.save_load.async_save": beside}
    ended = train(plan, tmp_path, "faults:train_until", overrides, moment="save", call=1, leaves=LEAST_BYTES)
    names = {one.value["name"] for one in ended if one.value}
    assert names <= {"", "OutOfMemoryError"} and all(one.value for one in ended), ended
    if names == {""}:
        assert (tmp_path / f"epoch_0_step_{STEPS}").is_dir()
    resumed = train(plan, tmp_path, overrides={"Engine.save_load.resume": "auto"})
    assert [one.error for one in resumed] == [None] * plan.world_size
