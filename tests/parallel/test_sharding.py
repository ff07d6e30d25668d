"""Who owns what among the sharding ranks."""

from types import SimpleNamespace

import pytest

from ppfleetx.parallel.sharding import Sharding
from tests.models.gpt_builders import build, tiny_config

GROUP = SimpleNamespace(nranks=2, rank=0, ranks=[0, 1])


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_frozen_and_trained_values_are_both_shared_evenly(trains):
    parameters = build(tiny_config(lora={"rank": 4})).parameters()
    kinds = [[p for p in parameters if p.stop_gradient is not wanted] for wanted in (True, False)]
    sharding = Sharding(kinds[0], GROUP, stage=1, frozen=kinds[1])
    chosen = kinds[0] if trains else kinds[1]
    assert all(p.stop_gradient is not trains for p in chosen)
    total, held = sum(p.size for p in chosen), sum(p.size for p in chosen if sharding.owns(p))
    largest = max(p.size for p in chosen)
    assert abs(2 * held - total) <= largest
