import pytest

from tests.e2e.resumption import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Prefix of a corpus."""
    prefix = tmp_path_factory.mktemp("corpus") / "toy"
    write_corpus(prefix)
    return prefix
