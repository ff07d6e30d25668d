from collections.abc import Iterator

import pytest

from tests.helpers.ranks import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(n)``: a pool of n ranks, kept for all tests."""
    pools = Pools()
    yield pools
    pools.close()
