"""Expert parallelism gives the results of one rank with all rows and experts."""

import numpy as np
import pytest

from ppfleetx.config.mesh import levels_of
from ppfleetx.nn.token_dispatcher import sorted_by_expert
from tests.nn.token_dispatcher_cases import ROUTES


def test_order_by_expert():
    # Two slices, two sources, two experts; slice 0 has 3 rows of padding.
    table = np.array([[[1, 0], [0, 2]], [[1, 1], [2, 2]]])[:, None]
    # In slice 0: a(expert 0) | b b (expert 1); in slice 1: c(0) d(1) | e e(0) f f(1).
    assert sorted_by_expert(table, 6).tolist() == [0, 6, 8, 9, 1, 2, 7, 10, 11]
    # The same sources as places of one slice on two nodes: a(node 0) b b(node 1) | c(0) d(0) e e(1) f f(1).
    table = np.array([[[1, 0], [0, 2]], [[1, 1], [2, 2]]])[None]
    assert sorted_by_expert(table, 0).tolist() == [0, 3, 5, 6, 4, 1, 2, 7, 8]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("ep", "emp"), [(2, 1), (1, 2), (4, 1), (2, 2)])
def test_outputs_and_gradients_are_those_of_one_rank(pools, ep, emp, route):
    differences = pools(ep * emp).run(
        "tests.nn.token_dispatcher_cases:worst_difference", ep=ep, emp=emp, route=route
    )
    assert max(differences) < 1e-5


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("ep", "emp", "per_node"), [(4, 1, 2), (4, 2, 4), (8, 1, 4), (8, 1, 2)])
def test_two_levels_give_the_bits_of_one(pools, ep, emp, per_node, route):
    calls = pools(ep * emp).run(
        "tests.nn.token_dispatcher_cases:levels_apart", ep=ep, emp=emp, route=route, per_node=per_node
    )
    nodes, places = ep * emp // per_node, per_node // emp
    for one, two in calls:  # counts and rows there, rows back, and both for the gradient
        assert one == [ep] * 5
        assert two == [nodes, places, nodes, places, places, nodes, nodes, places, places, nodes]


@pytest.mark.parametrize(
    ("ranks", "per_node", "levels"),
    [
        ([0, 1, 2, 3], 2, ([(0, 2), (1, 3)], [(0, 1), (2, 3)])),
        ([1, 3, 5, 7], 4, ([(1, 5), (3, 7)], [(1, 3), (5, 7)])),
        ([0, 1, 2, 3], 4, None),  # one node
        ([0, 4, 8], 4, None),  # one rank on each node
        ([2, 3, 4, 5], 3, None),  # unequal
    ],
)
def test_groups_of_two_levels(ranks, per_node, levels):
    assert levels_of(ranks, per_node) == levels


def test_ranks_that_hold_the_same_rows_share_them(pools):
    assert pools(2).run("tests.nn.token_dispatcher_cases:halves") == [[2, 3, 1], [2, 2, 1]]
