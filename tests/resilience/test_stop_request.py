"""A rank gets SIGTERM several times from its launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ppfleetx.resilience.stop_request import StopRequest


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The handlers of SIGTERM, as they are installed in a rank."""
    handlers: list[object] = []
    real, before = signal.signal, signal.getsignal(signal.SIGTERM)

    def install(number: int, handler: object) -> object:
        if number == signal.SIGTERM:
            handlers.append(handler)
        return real(number, handler)

    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    monkeypatch.setattr(signal, "signal", install)
    yield handlers
    real(signal.SIGTERM, before)


@pytest.mark.parametrize("agreed", [True, False], ids=["stopped", "was done as it came"])
def test_a_stopping_rank_is_not_ended_by_the_next_signal(installed: list[object], agreed: bool) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.agree(agreed)
    assert stop.signal_name == "SIGTERM"
    assert installed == [stop._handle, signal.SIG_IGN]  # and nothing between the two


def test_without_a_signal_the_former_handler_is_back(installed: list[object]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("ignored", [False, True], ids=["terminal", "nohup"])
def test_a_lost_terminal_stops_the_run_unless_it_is_ignored(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal_name == (None if ignored else "SIGHUP")
    finally:
        signal.signal(signal.SIGHUP, before)
