"""How long a process waits for the other processes of its job at the start, and how it ends when one of them
is gone."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ppfleetx.config.errors import ConfigError, PeerEndedError

Ended = TypeVar("Ended", bound=PeerEndedError)


START_VARIABLE = "PPFLEETX_START_TIMEOUT"
_START_SECONDS = 600.0


def start_timeout() -> float:
    """Return the number of seconds that nodes and ranks wait for each other at the start
    (``PPFLEETX_START_TIMEOUT``, default 600). Raises ConfigError if the variable is not a number of at least
    1."""
    return seconds_in(START_VARIABLE, _START_SECONDS, least=1.0)


def seconds_in(variable: str, default: float, *, least: float = 0.0) -> float:
    """Return the number of seconds in an environment variable, or ``default`` if it is not set. Raises
    ConfigError if the value is not a number, or is less than ``least``."""
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not least <= seconds < math.inf:
        rule = f"not a number of seconds, {least:g} or more" + ("" if least else " (0: no limit)")
        raise ConfigError(rule, key=variable, value=text, place="environment")
    return seconds


# -- the loss of another process --------------------------------------------------------


@dataclass
class _State:
    raised: PeerEndedError | None = None
    grace: float | None = None
    exit_code: int = 1
    is_ending: bool = False
    is_decided: bool = False


_state = _State()


def end_with_peers(grace: float, exit_code: int) -> None:
    """Allow :func:`report_lost` to end this process with ``exit_code``, ``grace`` seconds after another
    process of the job is lost."""
    # Usually, an error in the next communication ends this process earlier, but until then the process
    # can compute for hours.
    _state.grace, _state.exit_code = grace, exit_code


def may_end_process() -> bool:
    """Return whether ppfleetx may end this process: True only in ppfleetx's own programs, which call
    :func:`end_with_peers`."""
    return _state.grace is not None


def decide_end() -> None:
    """Record that a thread, such as the watchdog, is about to end this process. From now on,
    :func:`report_lost` does nothing."""
    # Another process that is lost after this has presumably ended for the same reason.
    _state.is_ending = _state.is_decided = True


def is_end_decided() -> bool:
    return _state.is_decided


def report_lost(sentence: str, say_goodbye: Callable[[], None]) -> None:
    """Schedule the end of this process, because another process of the job is gone, and return at once.

    After the ``grace`` of :func:`end_with_peers`, ``sentence`` is printed, ``say_goodbye`` is called, and the
    process ends. Does nothing if :func:`end_with_peers` was not called, or if this process is already about
    to end.
    """
    if _state.grace is not None and not _state.is_ending:
        _state.is_ending = True
        timer = threading.Timer(_state.grace, _end, (sentence, say_goodbye))
        timer.daemon = True
        timer.start()


def note_raised(error: Ended) -> Ended:
    """Remember ``error``, which says that another process has ended, and return it. :func:`ended_peer_in`
    then finds it even if Paddle raises another error in its place."""
    _state.raised = error
    return error


_STORE_LOST = "TCP connection reset by peer"  # may be inside a ValueError of Paddle


def ended_peer_in(error: BaseException) -> PeerEndedError | None:
    """Return a PeerEndedError if ``error`` was raised because another process of the job has ended; otherwise
    None."""
    for one in _chain(error):
        if isinstance(one, PeerEndedError):
            return one
        # Paddle turns an error in the backward pass of a PyLayer into an OSError that quotes its text.
        if _state.raised is not None and str(_state.raised) in str(one):
            return _state.raised
        if _STORE_LOST in str(one):
            return PeerEndedError("the store of the job is gone: rank 0, which keeps it, has ended")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()  # a stored exception that is raised again can be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _end(sentence: str, say_goodbye: Callable[[], None]) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        text = f"error: {sentence}; this rank ended {_state.grace:g} s later, in something else"
        print(text, file=sys.stderr, flush=True)
    say_goodbye()
    os._exit(_state.exit_code)
