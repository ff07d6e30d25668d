"""`examples/gathered_attention.py`: another attention strategy equals one card too."""

from unittest import mock

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity.comparison import Comparison

TRAIN = "tests.parity.test_attention_strategy:train"


def train(**arguments):
    import examples.gathered_attention as example
    from tests.parity import training

    core = example.GatheredKeys.core
    with mock.patch.object(example.GatheredKeys, "core", autospec=True, side_effect=core) as called:
        found = training.train(**arguments)
    assert bool(called.call_count) == (arguments["world_size"] > 1)
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("plan", "model", "more"),
    [(Plan(sep=2), "gpt", {}), (Plan(sep=2), "llama", {"documents": True}), (Plan(sep=2, mp=2), "mixed", {})],
    ids=str,
)
def test_a_strategy_from_a_plugin_is_one_card(comparison, tmp_path, plan, model, more):
    runs = Comparison(comparison.pools, tmp_path, short=True, train=TRAIN)
    runs.check(plan, model, extra={"Model.name": "GatheredGPT"}, **more)
