"""``Engine.spike``: its decisions are the same under any plan and after a resume."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan
from tests.e2e.conftest import losses, records
from tests.e2e.program import GLOBAL_BATCH, error_of, train, values_of
from tests.helpers.ranks import Pools

BAD = 5 * GLOBAL_BATCH + 3  # a sample of step 6
SMALL = {"Model.num_layers": 2}
CHANGED = {"Engine.max_steps": 9, "Engine.save_load.save_steps": 4, **SMALL}
SPIKE = {"window": 8, "min_steps": 3, "loss_deviations": 10.0, "grad_norm_deviations": 0}


def run(pools: Pools, corpus: Path, output: Path, action: str, plan: ParallelPlan, **more: Any) -> list[str]:
    """Train; what each rank's program ended with."""
    spike = {f"Engine.spike.{key}": value for key, value in {**SPIKE, "action": action}.items()}
    values = values_of(plan, corpus, output, overrides={**CHANGED, **spike, **more.pop("overrides", {})})
    arguments = {"bad": [BAD], "once": False, "factor": 20.0, **more}
    target = "tests.e2e.test_spikes:train_with_spikes"
    return pools(plan.world_size).run(target, values=values, world=plan.world_size, **arguments)


PLANS = (
    ParallelPlan(dp=2),
    ParallelPlan(mp=2),
    ParallelPlan(pp=2),
    ParallelPlan(sharding=2, sharding_stage=2),
)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_spike_is_left_out_the_same_under_any_plan(pools, corpus, tmp_path, action):
    assert run(pools, corpus, tmp_path / "one", action, ParallelPlan()) == [""]
    [spike] = records(tmp_path / "one", "spike")
    assert (spike["at_step"], spike["what"], spike["action"], spike["verdict"]) == (6, "loss", action, "data")
    assert spike["step"] == (6 if action == "skip" else 4)
    assert spike["to_step"] == (None if action == "skip" else 4)
    assert spike["samples"] == [80, 96]
    alone = losses(tmp_path / "one")
    assert [step for step, _, _ in alone] == list(range(1, 10))
    consumed = [record["consumed_samples"] for record in records(tmp_path / "one", "train")]
    expected = range(1, 10) if action == "skip" else [1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert consumed == [GLOBAL_BATCH * steps for steps in expected]
    # Those that go back with replicas and with a pipeline are killed, too, below.
    for plan in PLANS if action == "skip" else PLANS[1::2]:
        assert run(pools, corpus, tmp_path / str(plan), action, plan) == [""] * 2
        found = losses(tmp_path / str(plan))
        assert [step for step, _, _ in found] == [step for step, _, _ in alone], plan
        for (_, loss, norm), (_, expected_loss, expected_norm) in zip(found, alone, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-4), plan
            assert norm == pytest.approx(expected_norm, rel=1e-3), plan


@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_samples_left_out_do_not_count_for_the_rate(pools, corpus, tmp_path, action):
    course = {
        "Optimizer.lr.decay_style": "linear",
        "Optimizer.lr.warmup_steps": 0,
        "Optimizer.lr.min_lr": 0.0,
    }
    for unit, size in {"step": 1, "sample": GLOBAL_BATCH}.items():
        lengths = {**course, "Optimizer.lr.unit": unit, "Optimizer.lr.decay_steps": 100 * size}
        assert run(pools, corpus, tmp_path / unit, action, ParallelPlan(), overrides=lengths) == [""]
    by_step, by_sample = (
        [record["lr"] for record in records(tmp_path / unit, "train")] for unit in ("step", "sample")
    )
    assert by_sample == pytest.approx(by_step, rel=1e-12)


@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_resumed_run_decides_as_one_that_was_not_interrupted(pools, corpus, tmp_path, action):
    one = ParallelPlan()
    early = {"Engine.max_steps": 4, "Optimizer.lr.decay_steps": 100}
    whole = {"Optimizer.lr.decay_steps": 100}
    run(pools, corpus, tmp_path / "whole", action, one, overrides=whole)
    run(pools, corpus, tmp_path / "parts", action, one, overrides=early)
    again = {**whole, "Engine.save_load.resume": True}
    run(pools, corpus, tmp_path / "parts", action, one, overrides=again)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert records(tmp_path / "parts", "spike") == records(tmp_path / "whole", "spike")


@pytest.mark.parametrize("plan", [ParallelPlan(dp=2), ParallelPlan(pp=2)], ids=str)
def test_a_run_that_was_killed_after_it_went_back_meets_the_spike_again(pools, corpus, tmp_path, plan):
    """Like the run that was not killed; the spike is recorded once."""
    early, whole = ({"Engine.max_steps": n, "Optimizer.lr.decay_steps": 100} for n in (6, 9))
    run(pools, corpus, tmp_path / "whole", "rewind", plan, overrides=whole)
    run(pools, corpus, tmp_path / "parts", "rewind", plan, overrides=early)
    shutil.rmtree(tmp_path / "parts" / "epoch_0_step_6")  # what it would have saved at its end
    assert [one["at_step"] for one in records(tmp_path / "parts", "spike")] == [6]
    again = {**whole, "Engine.save_load.resume": "auto"}
    assert run(pools, corpus, tmp_path / "parts", "rewind", plan, overrides=again) == ["", ""]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert records(tmp_path / "parts", "spike") == records(tmp_path / "whole", "spike")
    assert len(records(tmp_path / "whole", "spike")) == 1


def test_spikes_of_earlier_data_stay_on_record(pools, corpus, tmp_path):
    """Where a run starts its data from the beginning; a later spike has its place in the new order."""
    run(pools, corpus, tmp_path, "skip", ParallelPlan())
    before = records(tmp_path, "spike")
    fresh = {"Engine.save_load.resume": "auto", "Engine.save_load.reset_data": True}
    more = {**fresh, "Engine.max_steps": 16, "Optimizer.lr.decay_steps": 100}
    more["Engine.save_load.lr_schedule"] = "config"
    run(pools, corpus, tmp_path, "skip", ParallelPlan(), overrides=more)
    [first, second] = records(tmp_path, "spike")
    assert [first] == before
    assert (second["at_step"], second["samples"]) == (15, [80, 96])


def test_stop_ends_the_run_with_what_it_found(pools, corpus, tmp_path):
    messages = run(pools, corpus, tmp_path, "stop", ParallelPlan(dp=2))
    assert all(messages)  # only the rank that reads the sample sees the number that this test puts there
    assert messages[0].startswith("global step 6: a spike: the loss is ")
    assert (
        "repeated, it is the same: the cause is in the data or the model; nothing was updated" in messages[0]
    )
    assert [step for step, _, _ in losses(tmp_path)] == [1, 2, 3, 4, 5]
    assert records(tmp_path, "spike")[0]["action"] == "stop"


def test_a_fault_of_the_machine_costs_nothing(pools, corpus, tmp_path):
    run(pools, corpus, tmp_path / "sound", "skip", ParallelPlan(), bad=[])
    run(pools, corpus, tmp_path / "fault", "skip", ParallelPlan(), once=True)
    assert losses(tmp_path / "fault") == losses(tmp_path / "sound")
    [spike] = records(tmp_path / "fault", "spike")
    assert (spike["action"], spike["verdict"]) == ("repeated", "machine")
    assert spike["repeated_loss"] == losses(tmp_path / "sound")[5][1]


def test_numbers_that_are_not_finite_are_spikes_from_the_first_step_on(pools, corpus, tmp_path):
    assert run(pools, corpus, tmp_path, "skip", ParallelPlan(dp=2), bad=[3], factor=None) == ["", ""]
    [spike] = records(tmp_path, "spike")
    assert (spike["step"], spike["loss"], spike["median"]) == (1, None, None)
    assert len(losses(tmp_path)) == 9


def test_too_many_spikes_in_a_row_end_the_run(pools, corpus, tmp_path):
    bad = [GLOBAL_BATCH * step for step in range(5, 9)]
    more = {"Engine.spike.max_in_a_row": 2}
    [message] = run(pools, corpus, tmp_path, "skip", ParallelPlan(), bad=bad, overrides=more)
    assert message.endswith("3 steps in a row were spikes (Engine.spike.max_in_a_row)")
    assert [spike["action"] for spike in records(tmp_path, "spike")] == ["skip", "skip", "stop"]


@pytest.mark.parametrize("plan", [ParallelPlan(dp=2), ParallelPlan(pp=2)], ids=str)
def test_a_slow_rank_is_named(pools, corpus, tmp_path, plan):
    values = values_of(
        plan, corpus, tmp_path, overrides={"Engine.straggler_freq": 4, "Engine.max_steps": 6, **SMALL}
    )
    target = "tests.e2e.test_spikes:train_with_a_slow_rank"
    pools(2).run(target, values=values, world=2, rank=1, seconds=0.5)
    [found] = records(tmp_path, "stragglers")
    assert [slow["rank"] for slow in found["slowest"]] == [1]
    assert found["slowest"][0]["compute"] > 0.45 and found["cost"] > 0.05
    assert (found["step"], found["steps"]) == (4, 4)


# -- in the ranks


def train_with_spikes(
    values: Mapping[str, Any], world: int, bad: Sequence[int], once: bool, factor: float | None
) -> str:
    """:func:`tests.e2e.program.train`; the user's error it ends with, or "".

    Args:
        bad: positions in the training order; a step that has one of them has ``factor`` times the loss and
            gradient norm.
        once: a step that is computed again is as it should be: a fault of the machine.
        factor: null: not a number.
    """
    from ppfleetx.parallel.step_runner import StepRunner

    gradients, repeat, wanted = StepRunner._gradients, StepRunner._repeat, set(bad)
    state = {"repeats": False}

    def spoilt(runner: StepRunner, micro_batches: Any, counts: Any) -> tuple[Any, ...]:
        loss, norm, *rest = gradients(runner, micro_batches, counts)
        here = {int(i) for batch in micro_batches for i in batch["sample_ids"]} & wanted
        if not here or (once and state["repeats"]):
            return loss, norm, *rest
        by = float("nan") if factor is None else factor
        return loss * by, norm * by, *rest

    def repeated(runner: StepRunner, *arguments: Any) -> tuple[float, float]:
        state["repeats"] = True
        try:
            return repeat(runner, *arguments)
        finally:
            state["repeats"] = False

    patched = {"_gradients": spoilt, "_repeat": repeated}
    with mock.patch.multiple(StepRunner, **patched):
        return error_of(train, values, world)


def train_with_a_slow_rank(values: Mapping[str, Any], world: int, rank: int, seconds: float) -> str:
    """:func:`tests.e2e.program.train`, with a rank that computes so much longer in each step."""
    import os
    import time

    from ppfleetx.parallel.step_runner import StepRunner

    gradients = StepRunner._gradients

    def slow(runner: StepRunner, *arguments: Any) -> tuple[float, float, bool]:
        if os.environ["PADDLE_TRAINER_ID"] == str(rank):
            time.sleep(seconds)
        return gradients(runner, *arguments)

    with mock.patch.object(StepRunner, "_gradients", slow):
        return train(values, world)
