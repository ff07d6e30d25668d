"""What goes for all tests: files that take minutes come first, so that two workers end at the same time."""

from __future__ import annotations

import pytest

_LONG = ("parity/", "faults/", "e2e/", "deploy/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_short)  # stable: otherwise the order stays


def _is_short(item: pytest.Item) -> int:
    return next((i for i, part in enumerate(_LONG) if f"tests/{part}" in str(item.path)), len(_LONG))
