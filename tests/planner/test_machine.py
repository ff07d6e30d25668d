"""Memory and communication on this machine: a few of the plans that ``make planner-accuracy`` runs all of."""

import pytest

from tests.planner.machine import compare_memory, compare_traffic
from tests.planner.plans import MEMORY_PLANS, TRAFFIC_PLANS


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
    ],
    ids=str,
)
def test_memory_is_what_the_allocator_counts(pools, plan, family):
    assert plan in MEMORY_PLANS
    for row in compare_memory(pools, plan, family):
        exact = not row.what.startswith("peak")
        assert abs(row.error) <= (0.0 if exact else 0.08), row


@pytest.mark.parametrize("plan", [{}, {"mp": 2, "sp": 1, "recompute": "full"}], ids=str)
def test_memory_of_branches_side_by_side_and_of_normalised_heads(pools, plan):
    for row in compare_memory(pools, plan, "mixed"):
        exact = not row.what.startswith("peak")
        assert abs(row.error) <= (0.0 if exact else 0.08), row


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ({"mp": 2, "sp": 1, "recompute": "full_attn"}, "gpt"),
        ({"mp": 2, "pp": 2}, "llama"),
        ({"mp": 2, "pp": 2, "p2p": 1}, "gpt"),
        ({"dp": 2, "sep": 2}, "gpt"),
        ({"sharding": 2, "stage": 3}, "llama"),
    ],
    ids=str,
)
def test_ranks_send_what_is_predicted(pools, plan, family):
    assert plan in TRAFFIC_PLANS
    for row in compare_traffic(pools, plan, family):
        assert abs(row.error) <= 0.01, row
