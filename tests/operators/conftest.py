import pytest

from tests.helpers.ranks import Pools


@pytest.fixture(scope="session")
def pools():
    """Fresh ranks, so that the log has everything they run."""
    pools = Pools()
    yield pools
    pools.close()
