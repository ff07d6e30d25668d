"""How a program learns that another process of the job has ended, and ends too.

What talks to other processes reports here; ``utils/cli.py``, which does not know it, ends the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ppfleetx.config.errors import PeerEndedError

Ended = TypeVar("Ended", bound=PeerEndedError)


@dataclass
class _State:
    raised: PeerEndedError | None = None
    grace: float | None = None
    exit_code: int = 1
    is_ending: bool = False
    is_decided: bool = False


_state = _State()


def end_with_peers(grace: float, exit_code: int) -> None:
    """From now on this process ends ``grace`` seconds after the loss of a peer, whatever it does then.

    It should end by itself, with the error that its next communication raises; but it may compute for hours
    before it communicates again.
    """
    _state.grace, _state.exit_code = grace, exit_code


def ends_this_process() -> bool:
    """Whether this is a program of ours, which may end the process; in another's program it must not."""
    return _state.grace is not None


def decide_end() -> None:
    """This process is about to be ended by a thread: what other threads find meanwhile is a consequence."""
    _state.is_ending = _state.is_decided = True


def is_end_decided() -> bool:
    """Whether :func:`decide_end` was called."""
    return _state.is_decided


def report_lost(sentence: str, say_goodbye: Callable[[], None]) -> None:
    """A peer is gone, and the job cannot go on; to be called once, from any thread.

    Args:
        sentence: who is gone and why.
        say_goodbye: called before the process is ended from here.
    """
    if _state.grace is not None and not _state.is_ending:
        _state.is_ending = True
        timer = threading.Timer(_state.grace, _end, (sentence, say_goodbye))
        timer.daemon = True
        timer.start()


def note_raised(error: Ended) -> Ended:
    """Remember an error that is about to be raised: Paddle may put another in its place."""
    _state.raised = error
    return error


_STORE_LOST = "TCP connection reset by peer"  # Paddle's words, of a ValueError


def ended_peer_in(error: BaseException) -> PeerEndedError | None:
    """The end of a peer that is behind ``error``, if one is.

    What is raised in the backward pass of a ``PyLayer`` leaves Paddle as an OSError that quotes it.
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
    with contextlib.suppress(OSError, ValueError):  # nobody may be left to read it
        text = f"error: {sentence}; this rank ended {_state.grace:g} s later, in something else"
        print(text, file=sys.stderr, flush=True)
    say_goodbye()
    os._exit(_state.exit_code)
