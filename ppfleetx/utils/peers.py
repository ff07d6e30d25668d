"""The other processes of the job: how long to wait for them at the start, and how to end when one is lost.

Code that communicates with other processes reports a lost process here, and ``utils/cli.py`` ends the
program.
"""

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
    """Return the number of seconds that the nodes, and then the ranks, of a job wait for each other at the
    start (``PPFLEETX_START_TIMEOUT``, default 600).

    Raises:
        ConfigError: the variable is not a number of at least 1.
    """
    return seconds_in(START_VARIABLE, _START_SECONDS, least=1.0)


def seconds_in(variable: str, default: float, *, least: float = 0.0) -> float:
    """Read a number of seconds from an environment variable.

    Raises:
        ConfigError: the variable is not a number, or is less than ``least``.
    """
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
    """End this process ``grace`` seconds after the loss of a peer, whatever it is doing.

    Usually its next communication raises an error earlier, but it may compute for hours before.
    """
    _state.grace, _state.exit_code = grace, exit_code


def may_end_process() -> bool:
    """Return whether this process may be ended: it runs one of ppfleetx's programs, not a user's."""
    return _state.grace is not None


def decide_end() -> None:
    """Record that a thread is about to end this process, so that later errors in other threads are treated as
    consequences."""
    _state.is_ending = _state.is_decided = True


def is_end_decided() -> bool:
    return _state.is_decided


def report_lost(sentence: str, say_goodbye: Callable[[], None]) -> None:
    """Record that a peer is gone and the job cannot continue. Called once, from any thread.

    Args:
        sentence: message to print if this process is ended.
        say_goodbye: a function that informs the other processes, called just before the process ends.
    """
    if _state.grace is not None and not _state.is_ending:
        _state.is_ending = True
        timer = threading.Timer(_state.grace, _end, (sentence, say_goodbye))
        timer.daemon = True
        timer.start()


def note_raised(error: Ended) -> Ended:
    """Remember an error that is about to be raised, because Paddle may replace it with another."""
    _state.raised = error
    return error


_STORE_LOST = "TCP connection reset by peer"  # may be inside a ValueError of Paddle


def ended_peer_in(error: BaseException) -> PeerEndedError | None:
    """Return the error that names the process whose end caused ``error``, or None.

    Paddle turns an error in the backward pass of a ``PyLayer`` into an OSError that quotes the error.
    """
    for one in _chain(error):
        if isinstance(one, PeerEndedError):
            return one
        if _state.raised is not None and str(_state.raised) in str(one):
            return _state.raised
        if _STORE_LOST in str(one):
            return PeerEndedError("the store of the job is gone: rank 0, which keeps it, has ended")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
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
