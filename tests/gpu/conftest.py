"""Tests of what needs a GPU: ``pytest -m gpu``; docs/gpu.md says what they show and how to tell us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gpu.place import Place, place
from tests.gpu.report import MARKER
from tests.helpers.ranks import Pools
from tests.parity.comparison import Comparison

PLANS_IN_A_PROCESS = 12
"""On a card, before its ranks are started again: their communicators hold memory until the process ends."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no GPU, say so."""
    chosen = [item for item in items if item.get_closest_marker(MARKER)]
    if chosen and place().obstacle:
        for item in chosen:
            item.add_marker(pytest.mark.skip(reason=place().obstacle))
    for item in chosen:
        item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def here() -> Place:
    """What the tests run on."""
    return place()


@pytest.fixture(scope="session")
def device(here: Place) -> str:
    """``gpu``, or ``cpu`` in a dry run."""
    return here.device


@pytest.fixture(scope="session")
def pools(here: Place) -> Iterator[Pools]:
    """Ranks, each with a card of its own. The tests' own process never touches one: what a broken kernel
    leaves behind ends with the rank, and the next test has a new one."""
    pools = Pools(device=here.device, most_calls=PLANS_IN_A_PROCESS if here.has_gpu else 0)
    yield pools
    pools.close()


@pytest.fixture
def alone(pools: Pools) -> Callable[..., Any]:
    """``alone("numbers:function", **arguments)``: what a function of ``tests/gpu/cases`` gives in a process
    with one card."""
    return lambda target, **arguments: pools(1).run(f"tests.gpu.cases.{target}", timeout=600.0, **arguments)[
        0
    ]


@pytest.fixture
def together(pools: Pools) -> Callable[..., list[Any]]:
    """The same in several ranks: ``together(2, target, **arguments)``, results by rank."""
    return lambda size, target, **arguments: pools(size).run(
        f"tests.gpu.cases.{target}", timeout=600.0, **arguments
    )


@pytest.fixture(scope="session")
def comparison(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Plans against one card, exact float32 on both sides."""
    directory = tmp_path_factory.mktemp("parity")
    return Comparison(pools, directory, short=True, train="tests.gpu.cases.training:train")


@pytest.fixture
def need_cards(here: Place) -> Callable[[int], None]:
    """``need_cards(2)``: skip where there are fewer."""

    def need(count: int) -> None:
        if here.cards < count:
            pytest.skip(f"needs {count} cards, {here.cards} visible")

    return need


@pytest.fixture
def need_type(alone: Callable[..., Any], here: Place) -> Callable[[str], None]:
    """``need_type("bfloat16")``: skip where the card does not compute in it. CPU ranks emulate it."""

    def need(dtype: str) -> None:
        if here.has_gpu and dtype != "float32" and not alone("numbers:computes", dtype=dtype):
            pytest.skip(f"this card does not compute in {dtype}")

    return need
