"""The same plan goes on bit for bit, dropout on, and however the checkpoint was written."""

import pytest

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.config.plan import ParallelPlan as Plan
from tests.e2e.program import losses
from tests.faults.program import Program

PLANS = [Plan(dp=2), Plan(mp=2, sequence_parallel=True), Plan(pp=2), Plan(sharding=2, sharding_stage=3)]


def contents(output_dir, step):
    """Where every tensor lies and what it holds, and the state beside the tensors."""
    manifest = open_checkpoint(output_dir / f"epoch_0_step_{step}").manifest
    return manifest.tensors, manifest.state, manifest.ranks


@pytest.mark.parametrize("plan", PLANS, ids=str)
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
        assert contents(background, step) == contents(whole, step)
    assert contents(rest, 4) == contents(whole, 4)
