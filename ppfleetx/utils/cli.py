"""How every program ends: its errors as one message and an exit code."""

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
from ppfleetx.utils.installed import not_installed
from ppfleetx.utils.orphans import end_with_launcher
from ppfleetx.utils.peers import end_with_peers, ended_peer_in, is_end_decided

EXIT_USER_ERROR = 2
EXIT_PEER_LOST = 3
EXIT_HUNG = 4
EXIT_NO_MEMORY = 5
EXIT_DEVICE = 6
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141  # what a shell reports of a program that SIGPIPE has ended

_OF_LAUNCHER = "PADDLE_TRAINER_ID"
# The launcher looks at its ranks every second or two, shows the log of the first it finds ended and then
# ends the others. It should find the one that failed, not those that ended because of it.
_LAUNCHER_LOOKS_SECONDS = 5.0
# So long after the loss of another process this one may go on with what is no communication.
_GRACE_SECONDS = 20.0


def run_tool(main: Callable[[], int | None]) -> None:
    """Run a tool's ``main`` and end the process with its exit code.

    A :class:`UserError`, or a library that is not installed, is printed as one message and ends with code 2,
    no memory left with code 5, an error of the card with code 6, the end of another process of the job with
    code 3, also where Paddle has wrapped it into an error of its own. When the reader of
    standard output has gone (``| head -1``), nobody wants the rest: the tool ends without a word, with code
    141. Anything else is a defect of the program and keeps its traceback.
    SIGTERM and SIGHUP end the process with a sentence, once what is under way has cleaned up behind itself,
    unless the tool has its own way, as training has with SIGTERM.
    Characters that the encoding of standard output lacks are written as escapes.
    """
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
    """A signal is to end this process: whoever has something to clean up does so as this passes."""


_came: list[int] = []  # the signal


def _unwind_at_signals() -> None:
    """Make SIGTERM and SIGHUP clean up (temporary directories) and print a sentence before they end this
    process, as they would have ended it (a shell shows exit codes 143 and 129). A second one ends it at once.

    Nothing is changed in the ranks of a job. They may wait for others in C++ code, where no Python handler
    runs, and the launcher says why it ends them.
    """
    own, handled = os.getpid(), (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for one in handled:
            if signal.getsignal(one) is end:
                signal.signal(one, signal.SIG_DFL)
        if os.getpid() != own:  # forked from it
            os.kill(os.getpid(), number)
        _came.append(number)
        raise _SignalCameError

    if threading.current_thread() is threading.main_thread() and _OF_LAUNCHER not in os.environ:
        for number in handled:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)


def _end_by_signal() -> None:
    """Where a signal has come, end by it: whatever has become of the exception on its way through C++."""
    if not _came:
        return
    name = signal.Signals(_came[0]).name
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"ended by {name}; there was nothing to save", file=sys.stderr, flush=True)
    signal.signal(_came[0], signal.SIG_DFL)
    os.kill(os.getpid(), _came[0])


def _keep_exit_code() -> None:
    """This rank ends anyway: a launcher that ends it a moment sooner must not change the exit code."""
    if _OF_LAUNCHER in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _exit_code_of(error: Exception) -> int | None:
    """Say what has to be said of an error that is no defect of this program; None: it is one."""
    ended = ended_peer_in(error)
    if ended is not None and is_end_decided():
        time.sleep(_GRACE_SECONDS)  # the thread that has decided ends the process, and has said why
    if ended is not None:
        print(f"error: {ended}", file=sys.stderr, flush=True)
        if _OF_LAUNCHER in os.environ:
            _wait_for_the_launcher()
            _keep_exit_code()
        return EXIT_PEER_LOST
    if isinstance(error, OutOfMemoryError | DeviceError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.last_value = error  # what the other processes of the job are told as this one's end
        _keep_exit_code()
        return EXIT_NO_MEMORY if isinstance(error, OutOfMemoryError) else EXIT_DEVICE
    if isinstance(error, BrokenPipeError) and _reader_has_gone():
        _discard_output()
        return EXIT_READER_GONE
    return None  # a broken pipe or socket that is not the user's doing, too


def _wait_for_the_launcher() -> None:
    """Let it find the rank that failed; when it has, it ends this one, which keeps its exit code."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    deadline = time.monotonic() + _LAUNCHER_LOOKS_SECONDS
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)


def _reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are reported unasked
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_output() -> None:
    """Let what is still buffered go nowhere, or Python complains when it flushes it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
