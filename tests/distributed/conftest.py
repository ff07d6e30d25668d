import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers.ranks import Pools


@pytest.fixture(scope="session")
def ranks():
    """``ranks(n)``: a pool of n ranks, kept for all tests."""
    pools = Pools()
    yield pools
    pools.close()
