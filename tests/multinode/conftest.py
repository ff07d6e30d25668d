"""Two nodes for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multinode.nodes import Node, NoNamespacesError, two_nodes


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    try:
        with two_nodes() as made:
            yield made
    except NoNamespacesError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
