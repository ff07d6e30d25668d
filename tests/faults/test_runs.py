"""Continued runs: ranks agree on the owner of the output directory, and results have the same bits."""

import pytest

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.run_ownership import read_run, run_of
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.e2e.program import losses
from tests.faults.program import Program

TWO = Plan(mp=2)


def content(directory):
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.endswith("lock"))
    return {path: path.read_bytes() for path in files}


def outcomes(program):
    """The message with which each rank ends."""
    ended = program.call()
    return {None if outcome.error is None else outcome.error.partition(": ")[2] for outcome in ended}


def test_all_ranks_are_refused_or_go_on_together(pools, corpus, tmp_path):
    assert outcomes(Program(pools, corpus, tmp_path, TWO, keep_max=2)) == {None}
    before, run = content(tmp_path), read_run(tmp_path).run
    (refusal,) = outcomes(Program(pools, corpus, tmp_path, TWO))
    assert "already holds a run" in refusal
    assert content(tmp_path) == before

    step_3 = tmp_path / "epoch_0_step_3"
    more = {"overwrite": True, "init_from": step_3, "async_save": True, "keep_max": 1, "save_steps": 2}
    (refusal,) = outcomes(Program(pools, corpus, tmp_path, TWO, **more))
    assert "holds epoch_0_step_3, and this run would save under the same name" in refusal
    assert content(tmp_path) == before

    moved = step_3.rename(tmp_path / "elsewhere")
    program = Program(pools, corpus, tmp_path, TWO, **{**more, "init_from": moved})
    assert outcomes(program) == {None}
    assert program.steps() == [4]
    assert run_of(moved) == run != run_of(tmp_path / "epoch_0_step_4") == read_run(tmp_path).run


# -- under the same plan a run goes on bit for bit, dropout on, and however the checkpoint was written

SAME_PLANS = [Plan(dp=2), Plan(mp=2, sequence_parallel=True), Plan(pp=2), Plan(sharding=2, sharding_stage=3)]


def saved_at(output_dir, step):
    """The slices and contents of all tensors, and the other state."""
    manifest = open_checkpoint(output_dir / f"epoch_0_step_{step}").manifest
    return manifest.tensors, manifest.state, manifest.ranks


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", SAME_PLANS, ids=str)
def test_continuation_and_background(pools, corpus, tmp_path, plan):
    whole, background, rest = tmp_path / "whole", tmp_path / "background", tmp_path / "rest"
    for output_dir, options in (
        (whole, {}),
        (background, {"async_save": True}),
        (rest, {"async_save": True, "ckpt_dir": background / "epoch_0_step_2"}),
    ):
        outcomes = Program(pools, corpus, output_dir, plan, **options).call()
        assert not any(outcome.error for outcome in outcomes), outcomes
    assert losses(background) == losses(whole)
    assert losses(rest) == losses(whole)[2:]
    for step in (1, 2, 3, 4):
        assert saved_at(background, step) == saved_at(whole, step)
    assert saved_at(rest, 4) == saved_at(whole, 4)
