"""When a checkpoint cannot be written, training stops with a message or continues; earlier checkpoints
stay."""

import errno
import os
import re

import pytest

from ppfleetx.checkpoint.resolve_checkpoint import newest_good, resolve_checkpoint
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.e2e.program import losses, records
from tests.faults.program import Program

BOTH_WAYS = pytest.mark.parametrize("in_background", [False, True], ids=["foreground", "background"])


@pytest.fixture(scope="module")
def undisturbed(pools, corpus, tmp_path_factory):
    """Losses of a run without disk errors, by plan and way of saving."""
    made = {}

    def losses_under(plan):
        if plan not in made:
            program = Program(pools, corpus, tmp_path_factory.mktemp("undisturbed"), plan)
            assert not any(outcome.error for outcome in program.call())
            made[plan] = losses(program.output_dir)
        return made[plan]

    return losses_under


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("fault", "number", "in_background"),
    [
        ("no space", errno.ENOSPC, False),
        ("no space", errno.ENOSPC, True),
        ("read only", errno.EROFS, False),
        ("not allowed", errno.EACCES, True),
    ],
)
def test_training_stops_in_words(pools, corpus, tmp_path, in_background, fault, number):
    program = Program(pools, corpus, tmp_path, async_save=in_background)
    (outcome,) = program.fail_at(3, fault=fault)
    assert outcome.error.startswith("CheckpointError: checkpoint epoch_0_step_3 could not be written to")
    assert f"{os.strerror(number)} (" in outcome.error and "Earlier checkpoints" in outcome.error
    assert program.steps() == [1, 2] and newest_good(tmp_path).step == 2
    assert resolve_checkpoint(tmp_path, verify=True).name == "epoch_0_step_2"
    assert not list(tmp_path.glob(".saving-*"))


@BOTH_WAYS
def test_training_continues_where_configured(pools, corpus, tmp_path, undisturbed, in_background):
    program = Program(pools, corpus, tmp_path, async_save=in_background, on_save_error="continue")
    (outcome,) = program.fail_at(2, 3)
    assert outcome.error is None
    assert program.steps() == [1, 4] and resolve_checkpoint(tmp_path, verify=True).name == "epoch_0_step_4"
    assert losses(tmp_path) == undisturbed(Plan())


@BOTH_WAYS
def test_the_best_checkpoint_is_the_best_of_those_that_were_saved(pools, corpus, tmp_path, in_background):
    options = {"async_save": in_background, "on_save_error": "continue", "keep_best": "loss"}
    program = Program(pools, corpus, tmp_path, **options)
    program.values |= {"Engine.eval_freq": 1, "Optimizer.lr.max_lr": 3.0}
    (outcome,) = program.fail_at(1)
    assert outcome.error is None
    found = {record["step"]: record["loss"] for record in records(tmp_path, "eval") if record["step"]}
    assert min(found, key=found.get) == 1, "the test needs the best result where the save fails"
    del found[1]
    best = resolve_checkpoint(tmp_path / "best", verify=True)
    assert best.name == f"epoch_0_step_{min(found, key=found.get)}"


def test_all_ranks_go_on_where_the_best_cannot_be_marked(pools, corpus, tmp_path):
    program = Program(
        pools, corpus, tmp_path, Plan(mp=2), on_save_error="continue", keep_best="loss", save_steps=2
    )
    program.values |= {"Engine.eval_freq": 2}
    (tmp_path / "best").mkdir()
    assert [outcome.error for outcome in program.call()] == [None, None]
    assert program.steps() == [2, 4]


@BOTH_WAYS
def test_a_last_save_that_fails_is_an_error_all_the_same(pools, corpus, tmp_path, in_background):
    program = Program(pools, corpus, tmp_path, async_save=in_background, on_save_error="continue")
    (outcome,) = program.fail_at(4)
    assert outcome.error.startswith("CheckpointError: checkpoint epoch_0_step_4 could not be written")
    assert outcome.error.endswith("The end of the run is not saved.")
    assert program.steps() == [1, 2, 3] and len(losses(tmp_path)) == 4


@pytest.mark.slow_after(1)
@BOTH_WAYS
@pytest.mark.parametrize(
    ("fault", "words"), [("no space", "rank 1: No space"), ("flipped bit", r"rank 1: .*wrong checksum")]
)
def test_one_rank_whose_part_is_not_written_is_named_by_all(
    pools, corpus, tmp_path, in_background, fault, words
):
    program = Program(pools, corpus, tmp_path, Plan(mp=2), async_save=in_background)
    for outcome in program.fail_at(2, fault=fault, rank=1):
        assert re.match(
            rf"CheckpointError: checkpoint epoch_0_step_2 could .* to \S+: {words}", outcome.error
        )
        assert "rank 0" not in outcome.error
    assert program.steps() == [1] and not list(tmp_path.glob(".saving-*"))
    assert resolve_checkpoint(tmp_path, verify=True).name == "epoch_0_step_1"


@BOTH_WAYS
def test_a_defect_on_one_rank_ends_all(pools, corpus, tmp_path, in_background):
    """Even with ``continue``, and at once: the others do not wait for a rank that has ended."""
    program = Program(pools, corpus, tmp_path, Plan(mp=2), async_save=in_background, on_save_error="continue")
    first, second = program.fail_at(2, fault="defect", rank=1)
    assert second.error == "TypeError: a defect"
    assert first.error == "PeerEndedError: another rank has failed: rank 1: TypeError: a defect"
    assert program.steps() == [1] and not list(tmp_path.glob(".saving-*"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("plan", "in_background"),
    [(Plan(mp=2), False), (Plan(mp=2), True), (Plan(dp=2), False), (Plan(pp=2), True)],
    ids=str,
)
def test_several_ranks_go_on_together(pools, corpus, tmp_path, undisturbed, in_background, plan):
    program = Program(pools, corpus, tmp_path, plan, async_save=in_background, on_save_error="continue")
    failing_rank = 0 if plan.dp > 1 else 1  # the second replica writes nothing
    assert not any(outcome.error for outcome in program.fail_at(2, rank=failing_rank))
    assert program.steps() == [1, 3, 4] and resolve_checkpoint(tmp_path, verify=True)
    assert losses(tmp_path) == undisturbed(plan)
