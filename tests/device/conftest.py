"""Tests on a device: ``pytest -m device --device NAME``; docs/gpu.md says what they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.device import reference
from tests.device.place import Place, place
from tests.device.report import MARKER
from tests.helpers.programs import SWITCH
from tests.helpers.ranks import Pools
from tests.parity.comparison import Comparison

PLANS_IN_A_PROCESS = 12
"""On a card, before its ranks are started again: their communicators hold memory until the process ends."""
PLANS_ON_THE_REFERENCE = 40


SHORT = (
    "test_communication.py::test_every_collective[2-float32",
    "test_memory.py::test_peaks_are_predicted[short",
    "test_plans.py::test_float32[gpt",
    "test_plans.py::test_16_bits[gpt: dp 1, mp 2, pp 1, sharding 1]",
    "test_precision.py::test_16_bits[gpt-",
    "test_precision.py::test_an_overflow",
)
"""What runs where nobody asked for these tests in particular; ``make device-test`` runs all."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is no such device, say so."""
    chosen = [item for item in items if item.get_closest_marker(MARKER)]
    if chosen and place().is_short:
        left_out = [item for item in chosen if not any(name in item.nodeid for name in SHORT)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
        chosen = [item for item in chosen if item not in set(left_out)]
    if chosen and place().obstacle:
        for item in chosen:
            item.add_marker(pytest.mark.skip(reason=place().obstacle))
    for item in chosen:
        item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def here() -> Place:
    """What the tests run on."""
    return place()


@pytest.fixture(autouse=True)
def _programs(request: pytest.FixtureRequest, here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs under test see the device. They are executed: what a card knows does not survive a fork."""
    if request.node.get_closest_marker(MARKER):
        for name, value in {SWITCH: "1", **here.environment}.items():
            monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def device(here: Place) -> str:
    """Its name, for ``Global.device``."""
    return here.device


@pytest.fixture(scope="session")
def pools(here: Place) -> Iterator[Pools]:
    """Ranks, each with a card of its own. The tests' own process never touches one: what a broken kernel
    leaves behind ends with the rank, and the next test has a new one."""
    environment = reference.strict() if here.is_reference and not here.obstacle else here.environment
    most_calls = PLANS_ON_THE_REFERENCE if here.is_reference else PLANS_IN_A_PROCESS
    with Pools(device=here.device, most_calls=most_calls, **environment) as pools:
        yield pools


@pytest.fixture
def together(pools: Pools) -> Callable[..., list[Any]]:
    """``together(2, "numbers:function", **arguments)``: what a function of ``tests/device/cases`` gives in
    processes with one card each, by rank."""
    return lambda size, target, **arguments: pools(size).run(
        f"tests.device.cases.{target}", timeout=600.0, **arguments
    )


@pytest.fixture
def alone(together: Callable[..., list[Any]]) -> Callable[..., Any]:
    """The same in one process: ``alone(target, **arguments)``."""
    return lambda target, **arguments: together(1, target, **arguments)[0]


@pytest.fixture(scope="session")
def comparison(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Plans against one card, exact float32 on both sides."""
    directory = tmp_path_factory.mktemp("parity")
    return Comparison(pools, directory, short=True, train="tests.device.cases.training:train")


@pytest.fixture
def need_cards(here: Place) -> Callable[[int], None]:
    """``need_cards(2)``: skip where there are fewer."""

    def need(count: int) -> None:
        if here.cards < count:
            pytest.skip(f"needs {count} cards, {here.cards} visible")

    return need


@pytest.fixture
def need_type(alone: Callable[..., Any], device: str) -> Callable[[str], None]:
    """``need_type("bfloat16")``: skip where the card does not compute in it."""

    def need(dtype: str) -> None:
        if dtype != "float32" and not alone("numbers:computes", device=device, dtype=dtype):
            pytest.skip(f"this card does not compute in {dtype}")

    return need
