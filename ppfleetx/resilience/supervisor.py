"""Restart a training command when it fails, after all of its processes have ended. Unlike ``--max_restart``
of Paddle's launcher, this needs no etcd server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.end_processes import (
    adopt_orphans,
    descendants,
    end_child_with_parent,
    end_descendants,
    stop_signals,
)
from ppfleetx.utils.exit_codes import EXIT_INTERRUPTED, EXIT_USER_ERROR
from ppfleetx.utils.log import configure_logging, get_logger

_MAX_BACKOFF = 300.0
_SETTLE_SECONDS = 1.0  # time for processes to end by themselves before a warning is logged
_FINAL = {
    EXIT_USER_ERROR: "a mistake that a restart does not correct",
    EXIT_INTERRUPTED: "Ctrl-C",
}


class ProcessesRemainError(RuntimeError):
    """Processes of the failed command cannot be ended, so the command cannot be restarted."""


RESUME = "Engine.save_load.resume"


def with_resume(command: Sequence[str]) -> list[str]:
    """Return ``command`` with ``-o Engine.save_load.resume=auto``, so that a restarted run continues from its
    last checkpoint. A command that already sets this key to ``auto`` or true is returned unchanged. Raises
    ConfigError if the command sets the key to anything else."""
    overrides = (text.removeprefix("--override=").removeprefix("-o").partition("=") for text in command)
    given = [value.strip() for key, _, value in overrides if key.strip() == RESUME]
    for value in given:
        if value.strip("'\"").lower() not in ("auto", "true", "yes", "on"):
            raise ConfigError(
                "the supervisor restarts a failed run from its last checkpoint; leave the override out, or "
                f"give {RESUME}=auto or true",
                key=RESUME,
                value=value,
                place="the supervised command",
            )
    return list(command) if given else [*command, "-o", f"{RESUME}=auto"]


def supervise(command: Sequence[str], *, max_restarts: int, backoff: float, grace: float) -> int:
    """Run ``command``, and run it again when it fails, at most ``max_restarts`` times. Returns the last exit
    code, or 1 if processes of a failed run cannot be ended. There is no restart after a user error, Ctrl-C,
    or a signal to the supervisor.

    Args:
        backoff: seconds to wait before the first restart; doubled for each further one. No wait is longer
            than 300 s.
        grace: seconds that processes have to end after SIGTERM, before SIGKILL.
    """
    log = configure_logging()
    stop = threading.Event()
    adopt_orphans()
    with _passing_signals_on(stop) as children:
        for attempt in range(max_restarts + 1):
            log.info(f"supervisor: start {attempt + 1} of at most {max_restarts + 1}")
            try:
                code = _run_once(command, children, stop, grace)
            except ProcessesRemainError as error:
                log.error(f"supervisor: {error}")
                return 1
            if code == 0 or stop.is_set():
                return code
            if code in _FINAL:
                log.error(f"supervisor: exit code {code}, {_FINAL[code]}; it is not restarted")
                return code
            if attempt < max_restarts:
                pause = min(backoff * 2**attempt, _MAX_BACKOFF)
                log.warning(f"supervisor: the command failed with code {code}; next start in {pause:.0f} s")
                if stop.wait(pause):
                    return code
    log.error(f"supervisor: failed with code {code} after {max_restarts} restarts; giving up")
    return code


def _run_once(
    command: Sequence[str], children: list[subprocess.Popen], stop: threading.Event, grace: float
) -> int:
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=end_child_with_parent)
    children[:] = [child]
    if stop.is_set():  # the signal came too early to be forwarded
        _signal_group(child, signal.SIGTERM)
    deadline: float | None = None
    try:
        while child.poll() is None:
            if stop.is_set() and deadline is None:
                deadline = time.monotonic() + grace
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        _signal_group(child, signal.SIGKILL)  # the command, or processes in its group that outlived it
        code = child.wait()
        _end_rest(grace)
    return code if code >= 0 else 128 - code


def _end_rest(grace: float) -> None:
    """End the processes that the command has left behind. Raises ProcessesRemainError if some do not end."""
    log = get_logger()
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (running := descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not running:
        end_descendants(0)  # only collects zombies
        return
    log.warning(
        f"supervisor: the command has ended, but not {_processes(running)} below it: SIGTERM now, SIGKILL in "
        f"{grace:g} s"
    )
    left = end_descendants(grace)
    if left:
        raise ProcessesRemainError(f"{_processes(left)} cannot be ended; nothing is started beside them")
    log.info("supervisor: they have ended")


def _processes(pids: Sequence[int]) -> str:
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"


@contextlib.contextmanager
def _passing_signals_on(stop: threading.Event) -> Iterator[list[subprocess.Popen]]:
    """Context manager that yields an empty list, to which the caller adds child processes. Inside,
    `stop_signals` set ``stop`` and are forwarded to the process groups of these children."""
    children: list[subprocess.Popen] = []

    def handle(number: int, frame: object) -> None:
        stop.set()
        for child in children:
            _signal_group(child, number)

    previous = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield children
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signal_group(child: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
