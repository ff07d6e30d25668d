"""Rows travel to their experts and back as if one rank had all of both."""

import numpy as np
import pytest

from ppfleetx.nn.expert_exchange import sorted_by_expert
from tests.nn.expert_exchange import ROUTES


def test_order_by_expert():
    # Two slices, two sources, two experts; slice 0 has 3 rows of padding.
    table = np.array([[[1, 0], [0, 2]], [[1, 1], [2, 2]]])
    # In slice 0: a(expert 0) | b b (expert 1); in slice 1: c(0) d(1) | e e(0) f f(1).
    assert sorted_by_expert(table, 6).tolist() == [0, 6, 8, 9, 1, 2, 7, 10, 11]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("ep", "emp"), [(2, 1), (1, 2), (4, 1), (2, 2)])
def test_outputs_and_gradients_are_those_of_one_rank(pools, ep, emp, route):
    differences = pools(ep * emp).run(
        "tests.nn.expert_exchange:worst_difference", ep=ep, emp=emp, route=route
    )
    assert max(differences) < 1e-5


def test_ranks_that_hold_the_same_rows_share_them(pools):
    assert pools(2).run("tests.nn.expert_exchange:halves") == [[2, 3, 1], [2, 2, 1]]
