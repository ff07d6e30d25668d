"""Options and fixtures that all tests share, and the order in which their files run."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import ppfleetx.commands  # noqa: F401 - as in every program, checkpoints of other programs can be read
from ppfleetx.utils.log import get_logger
from tests.device.place import CARDS, DEVICE
from tests.device.report import DeviceReport
from tests.e2e.resumption import write_corpus
from tests.helpers.leftovers import nothing_left
from tests.helpers.ranks import Pools

_LONG = ("parity/", "device/", "faults/", "e2e/", "deploy/")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for tests marked ``device``: where they run, and where their report goes."""
    group = parser.getgroup("device")
    group.addoption(
        "--device",
        default="",
        metavar="NAME",
        help="run the tests marked device on gpu, npu, xpu, ..., or on all plans of the reference device "
        "(reference); without this option, on some plans of it",
    )
    group.addoption("--cards", type=int, default=0, metavar="N", help="use so many cards (default: all)")
    group.addoption("--device-report", default="device_report.json", help="file for what these tests found")


def pytest_configure(config: pytest.Config) -> None:
    """Set up the device tests, and restore signals: a shell that starts pytest with ``&`` ignores Ctrl-C."""
    os.environ[DEVICE], os.environ[CARDS] = config.getoption("--device"), str(config.getoption("--cards"))
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist; the main process collects all reports
    if config.getoption("--device") and not is_worker:
        report = DeviceReport(Path(config.getoption("--device-report")).absolute())
        config.pluginmanager.register(report, "device-report")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """``pools(n)``: a job of n ranks, shared by the tests of a file."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small corpus whose next token can be learned."""
    prefix = tmp_path_factory.mktemp("corpus") / "toy"
    write_corpus(prefix)
    return prefix


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Fail a test that leaves a process running, and kill the process."""
    with nothing_left():
        yield


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Reset the logger, which a program that runs in the tests' process sets up."""
    _reset_log()
    yield
    _reset_log()


def _reset_log() -> None:
    logger = get_logger()
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the later cases of ``slow_after`` as slow, and run files that take minutes first, so that all
    workers end at about the same time."""
    cases: Counter[str] = Counter()
    for item in items:
        if quick := item.get_closest_marker("slow_after"):
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > quick.args[0]:
                item.add_marker("slow")
    items.sort(key=_is_short)  # stable: otherwise the order stays


def _is_short(item: pytest.Item) -> int:
    return next((i for i, part in enumerate(_LONG) if f"tests/{part}" in str(item.path)), len(_LONG))
