"""A few of the mutations that config_campaign.py makes by the thousand."""

from tests.faults.config_campaign import CONFIGS, MAX_SECONDS, campaign, in_child, shipped


def test_mutated_configurations_are_accepted_or_refused_in_words():
    tally = in_child(files=180, overrides=120, seed=11)
    assert tally.failures == []
    assert tally.cases == 300
    assert tally.accepted > 15
    assert tally.refused > 100
    assert 0 < tally.slowest_seconds < MAX_SECONDS
    assert 0 < tally.peak_mib < 500


def test_the_campaign_finds_what_is_wrong(monkeypatch):
    """A traceback, a message without a place and a long one are failures; equal seeds give equal cases."""
    first, again = campaign(20, 10, seed=3), campaign(20, 10, seed=3)
    assert (first.accepted, first.refused, first.failures) == (again.accepted, again.refused, [])

    def broken(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("tests.faults.config_campaign.load_config", broken)
    assert len(campaign(5, 5, seed=3).failures) == 10
    assert len(shipped()) == len(list(CONFIGS.rglob("*.yaml")))
