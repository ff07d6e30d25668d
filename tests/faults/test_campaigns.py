"""A few kills and a few damages of the campaigns that are run whole from the command line."""

import pytest

from ppfleetx.config.plan import ParallelPlan
from tests.faults.flip_campaign import campaign, make_checkpoint
from tests.faults.kill_campaign import Campaign
from tests.faults.lost_peer_campaign import Case, run_case
from tests.helpers.ranks import shared_nursery


@pytest.mark.parametrize("in_background", [False, True], ids=["foreground", "background"])
def test_killed_runs_end_as_if_nothing_had_happened(tmp_path, corpus, in_background):
    options = {"Engine.save_load.async_save": in_background}
    found = Campaign(shared_nursery(), tmp_path, corpus, overrides=options, seed=7, steps=12).kill(6)
    assert found["kills"] == 6 and found["finished runs"] >= 1


def test_every_damage_is_found(tmp_path, pools):
    assert campaign(make_checkpoint(pools, tmp_path), 24, seed=1).total() == 24


@pytest.mark.parametrize(
    "case",
    [
        # In the backward pass, where Paddle puts an error of its own in the place of ours.
        Case(ParallelPlan(mp=2), "kill", "step:0.7", rank=1),
        Case(ParallelPlan(mp=2), "kill", "step:0.2", rank=0),
        Case(ParallelPlan(pp=2, sharding=2, sharding_stage=3), "kill", "eval:0.5", rank=1),
        Case(ParallelPlan(sep=2), "kill", "save:1", rank=1, in_background=True),
    ],
    ids=str,
)
def test_the_others_end_and_name_who_was_lost(tmp_path, corpus, case):
    found = run_case(case, corpus, tmp_path)
    assert found.complaints == []
    assert found.seconds < 30
