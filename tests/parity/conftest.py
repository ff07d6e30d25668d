import pytest

from tests.helpers.ranks import Pools
from tests.parity.comparison import Comparison


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """Runs plans in forked ranks and compares them with one process."""
    with Pools() as pools:
        yield Comparison(pools, tmp_path_factory.mktemp("parity"), short=True)
