"""Memory and communication on this machine: a few of the plans that ``make planner-accuracy`` runs all of."""

import pytest

from ppfleetx.nn.cpu_ops import bfloat16
from tests.planner import measured
from tests.planner.machine import compare_memory, compare_traffic
from tests.planner.plans import MEMORY_PLANS, TRAFFIC_PLANS, overrides


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ({}, "gpt"),
        ({}, "llama"),
        ({"dp": 2, "micro": 4, "recompute": "core_attn"}, "llama"),
        ({"mp": 2, "sp": 1, "recompute": "full"}, "gpt"),
        ({"pp": 2, "vpp": 2}, "llama"),
        ({"pp": 4, "batch": 16, "p2p": 1}, "gpt"),
        ({"sharding": 2, "stage": 3}, "gpt"),
        ({"mp": 2, "chunks": 8, "recompute": "full"}, "llama"),
        ({}, "mixed"),  # branches side by side, and normalised heads
        ({"mp": 2, "sp": 1, "recompute": "full"}, "mixed"),
    ],
    ids=str,
)
def test_memory_is_what_the_allocator_counts(pools, plan, family):
    assert plan in MEMORY_PLANS
    check_memory(compare_memory(pools, plan, family))


def check_memory(rows):
    for row in rows:
        exact = not row.what.startswith("peak")
        assert abs(row.error) <= (0.0 if exact else 0.08), row


@pytest.mark.skipif(not bfloat16.are_available(), reason="this CPU has no bfloat16 products")
@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("plan", "family", "dropout"),
    [
        ({}, "llama", 0.0),
        ({"recompute": "full_attn"}, "gpt", 0.0),
        ({"mp": 2, "sp": 1}, "mixed", 0.0),
        ({}, "gpt", 0.1),  # keeps all scores
    ],
    ids=str,
)
def test_memory_of_long_sequences_in_bfloat16(pools, plan, family, dropout):
    lengths = [key for key in measured.SIZES if key.endswith(("max_seq_len", "max_position_embeddings"))]
    more = {
        **dict.fromkeys(lengths, 512),
        "Engine.mix_precision.enable": "true",
        "Engine.mix_precision.dtype": "bfloat16",
        "Model.attention_probs_dropout_prob": dropout,
    }
    check_memory(compare_memory(pools, plan, family, more))


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ({"dp": 2}, "gpt"),
        ({"dp": 4}, "gpt"),
        ({"mp": 4}, "gpt"),
        ({"mp": 2, "sp": 1}, "gpt"),
        ({"mp": 2, "sp": 1, "recompute": "full_attn"}, "gpt"),
        ({"pp": 4}, "gpt"),
        ({"sharding": 2, "stage": 1}, "gpt"),
        ({"sharding": 2, "stage": 2}, "gpt"),
        ({"sharding": 2, "stage": 3}, "llama"),
        ({"sep": 2}, "gpt"),
        ({"dp": 2, "mp": 2}, "gpt"),
        ({"dp": 2, "pp": 2}, "gpt"),
        ({"dp": 2, "sep": 2}, "gpt"),
        ({"mp": 2, "pp": 2}, "llama"),
        ({"mp": 2, "pp": 2, "p2p": 1}, "gpt"),
    ],
    ids=str,
)
def test_ranks_send_what_is_predicted(pools, plan, family):
    assert plan in TRAFFIC_PLANS
    for row in compare_traffic(pools, plan, family):
        assert abs(row.error) <= 0.01, row


def test_owners_send_parameters_in_few_messages(pools):
    """Stage 3, before each pass: one from each owner, of a block, of embedding, last norm and head."""
    given = overrides({"sharding": 4, "stage": 3})
    for result in pools(4).run("tests.planner.measured:traffic", overrides=given, family="gpt", world=4):
        owners = measured.SIZES["Model.num_layers"] * 4 + 2 + 2 + 1
        assert 0 < result["calls"]["sharding"]["broadcast"] <= 2 * result["micro_batches"] * owners
