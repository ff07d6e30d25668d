import pytest

from tests.helpers.ranks import Pools


@pytest.fixture(scope="session")
def pools():
    """Ranks of their own: what they run is logged from the first operator on."""
    pools = Pools()
    yield pools
    pools.close()
