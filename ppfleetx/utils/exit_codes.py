"""How a program ends: expected errors become one message and an exit code, without a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from ppfleetx.config.errors import DeviceError, OutOfMemoryError, UserError
from ppfleetx.utils.end_processes import end_with_launcher
from ppfleetx.utils.installed import not_installed
from ppfleetx.utils.launcher_env import is_rank
from ppfleetx.utils.lost_peers import end_with_peers, ended_peer_in, is_end_decided

EXIT_USER_ERROR = 2
EXIT_PEER_LOST = 3
EXIT_HUNG = 4
EXIT_NO_MEMORY = 5
EXIT_DEVICE = 6
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141  # the exit code in a shell after SIGPIPE

# The launcher checks its ranks every second or two, shows the log of the first rank that has ended, and ends
# the others. It should find the rank that failed, not a rank that ended because of that failure.
_LAUNCHER_LOOKS_SECONDS = 5.0
# Seconds for which this process can keep running after the loss of another process.
_GRACE_SECONDS = 20.0


def run_tool(main: Callable[[], int | None]) -> None:
    """Run a program's ``main`` and end the process with an exit code that says why it ended.

    A :class:`UserError` or a missing library prints one message and ends with code 2. Other codes are:

    - 3 if another process of the job has ended
    - 5 if memory ran out
    - 6 after an error of the accelerator
    - 130 after Ctrl-C
    - 141, without a message, if the reader of standard output is gone (``| head -1``)

    Any other exception is a bug and keeps its traceback. SIGTERM and SIGHUP end the process with a message
    after cleanup, unless the program handles them itself. In the ranks of a job, these signals are not
    handled.
    """
    # Write characters that standard output cannot encode as escapes.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    end_with_launcher()
    end_with_peers(_GRACE_SECONDS, EXIT_PEER_LOST)
    _unwind_at_signals()
    try:
        code = _call(main)
        _keep_exit_code()
        sys.stdout.flush()
    except UserError as error:
        _keep_exit_code()
        print(f"error: {error}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except Exception as error:
        code = _exit_code_of(error)
        if code is None:
            raise
    sys.exit(code or 0)


def _call(main: Callable[[], int | None]) -> int | None:
    try:
        return main()
    except ModuleNotFoundError as error:
        user_error = not_installed(error)
        if user_error is None:
            raise
        raise user_error from None
    finally:
        _end_by_signal()


class _SignalCameError(BaseException):
    """Raised when a signal arrives, to run ``finally`` blocks before the signal ends the process."""


_received: list[int] = []  # signal numbers


def _unwind_at_signals() -> None:
    """Let SIGTERM and SIGHUP end this process only after cleanup, with a message. A second signal ends the
    process at once. Does nothing in the ranks of a job."""
    own, handled = os.getpid(), (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for one in handled:
            if signal.getsignal(one) is end:
                signal.signal(one, signal.SIG_DFL)
        if os.getpid() != own:  # in a forked child
            os.kill(os.getpid(), number)
        _received.append(number)
        raise _SignalCameError

    # Ranks may wait in C++ code, where no Python handler runs.
    if threading.current_thread() is threading.main_thread() and not is_rank():
        for number in handled:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)


def _end_by_signal() -> None:
    if not _received:
        return
    name = signal.Signals(_received[0]).name
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"ended by {name}; there was nothing to save", file=sys.stderr, flush=True)
    signal.signal(_received[0], signal.SIG_DFL)
    os.kill(os.getpid(), _received[0])


def _keep_exit_code() -> None:
    """Ignore SIGTERM in a rank that is about to end by itself. Otherwise, the launcher's SIGTERM would
    replace the rank's exit code."""
    if is_rank():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _exit_code_of(error: Exception) -> int | None:
    """Return the exit code for an error that is not a bug, and print its message; None for a bug. Nothing is
    printed if the reader of standard output is gone."""
    ended = ended_peer_in(error)
    if ended is not None and is_end_decided():
        time.sleep(_GRACE_SECONDS)  # another thread has reported the reason and ends the process
    if ended is not None:
        print(f"error: {ended}", file=sys.stderr, flush=True)
        if is_rank():
            _wait_for_the_launcher()
            _keep_exit_code()
        return EXIT_PEER_LOST
    if isinstance(error, OutOfMemoryError | DeviceError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.last_value = error  # sent to the other processes of the job as the reason why this one ends
        _keep_exit_code()
        return EXIT_NO_MEMORY if isinstance(error, OutOfMemoryError) else EXIT_DEVICE
    if isinstance(error, BrokenPipeError) and _reader_has_gone():
        _discard_output()
        return EXIT_READER_GONE
    return None  # including a broken pipe or socket that the user did not cause


def _wait_for_the_launcher() -> None:
    """Delay the exit of this rank until the launcher sends SIGTERM, but at most for a few seconds."""
    # Another rank has failed; the launcher must see its exit first.
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    deadline = time.monotonic() + _LAUNCHER_LOOKS_SECONDS
    while not asked and time.monotonic() < deadline:
        time.sleep(0.05)


def _reader_has_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are always reported
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_output() -> None:
    """Discard buffered standard output. Nobody reads it, and Python would fail to write it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
