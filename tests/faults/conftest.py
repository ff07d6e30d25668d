import pytest

from tests.e2e.resumption import write_corpus
from tests.helpers.ranks import Pools


@pytest.fixture(scope="session")
def pools():
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Prefix of a corpus."""
    prefix = tmp_path_factory.mktemp("corpus") / "toy"
    write_corpus(prefix)
    return prefix
