"""A few kills and a few damages of the campaigns that are run whole from the command line."""

import pytest

from tests.faults.flip_campaign import campaign, make_checkpoint
from tests.faults.kill_campaign import Campaign
from tests.helpers.ranks import shared_nursery


@pytest.mark.parametrize("in_background", [False, True], ids=["foreground", "background"])
def test_killed_runs_end_as_if_nothing_had_happened(tmp_path, corpus, in_background):
    options = {"Engine.save_load.async_save": in_background}
    found = Campaign(shared_nursery(), tmp_path, corpus, overrides=options, seed=7, steps=12).kill(6)
    assert found["kills"] == 6 and found["finished runs"] >= 1


def test_every_damage_is_found(tmp_path, pools):
    assert campaign(make_checkpoint(pools, tmp_path), 24, seed=1).total() == 24
