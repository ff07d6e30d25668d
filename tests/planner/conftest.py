"""Ranks for comparisons with what really runs."""

import pytest

from tests.helpers.ranks import Pools


@pytest.fixture(scope="session")
def ranks():
    """``ranks(n)``: a pool of n ranks that stays alive over the tests."""
    pools = Pools()
    yield pools
    pools.close()
