from tests.parity.conftest import comparison  # noqa: F401
