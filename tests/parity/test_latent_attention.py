"""Latent attention however heads and sequences are cut, with documents, windows, recomputation."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.parity.comparison import TOLERANCE

TWO_LAYERS = {"Model.num_layers": 2}
CORE = {"Model.use_recompute": True, "Model.recompute_granularity": "core_attn"}
ATTENTION = {"Model.use_recompute": True, "Model.recompute_granularity": "full_attn"}


@pytest.mark.parametrize(
    ("plan", "extra"),
    [
        (Plan(mp=2), {"Model.attention_window": 5}),
        (Plan(mp=2, sequence_parallel=True), CORE),
        (Plan(sep=2), {"Model.latent_attention.q_rank": "null"}),
        (Plan(pp=2), ATTENTION),
        (Plan(sharding=2, sharding_stage=3), {}),
        (Plan(mp=2, sep=2, sequence_parallel=True), {"Model.add_bias_linear": True}),
        (Plan(pp=2, mp=2, pp_schedule="zb_h1"), {}),
    ],
    ids=str,
)
def test_it_trains_as_on_one_card(comparison, plan, extra):
    found = comparison.run(plan, "latent", "sgd", extra=TWO_LAYERS | extra, documents=True)
    assert found.first == 0.0
    assert found.worst <= TOLERANCE, str(found)
