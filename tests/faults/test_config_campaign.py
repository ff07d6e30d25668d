"""A few of the mutations that config_campaign.py makes by the thousand."""

from tests.faults.config_campaign import campaign


def test_mutated_configurations_are_accepted_or_refused_in_words():
    tally = campaign(files=180, overrides=120, seed=11)
    assert tally.failures == [] and tally.cases == 300
    assert tally.accepted > 15 and tally.refused > 100


def test_the_campaign_finds_what_is_wrong(monkeypatch):
    """A traceback is a failure; equal seeds give equal cases."""
    first, again = campaign(20, 10, seed=3), campaign(20, 10, seed=3)
    assert (first.accepted, first.refused, first.failures) == (again.accepted, again.refused, [])

    def broken(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("tests.faults.config_campaign.load_config", broken)
    assert len(campaign(5, 5, seed=3).failures) == 10
