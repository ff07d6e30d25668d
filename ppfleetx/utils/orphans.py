"""End a rank when its launcher is gone: after a ``kill -9`` of the launcher, nothing else would."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time

LAUNCHER_VARIABLE = "PPFLEETX_LAUNCHER_PID"
_OF_LAUNCHER = "PADDLE_RANK_IN_NODE"  # only the launcher sets it
_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
_LOOK_SECONDS = 1.0
_SAVE_SECONDS = 60.0  # that a rank has to stop after its step and save

_watched: set[int] = set()


def end_with_launcher() -> None:
    """From now on this process gets SIGTERM when the launcher that started it has gone, and later SIGKILL.

    Under a run SIGTERM means: stop after this step and save. Nothing happens in a process that no launcher
    has started, and in a second call.
    """
    if _OF_LAUNCHER not in os.environ or os.getpid() in _watched:
        return
    _watched.add(os.getpid())
    parent = os.getppid()
    given = os.environ.get(LAUNCHER_VARIABLE, "")
    launcher = int(given) if given.isdigit() else parent
    if launcher == parent:  # not a shell script between the two
        end_child_with_parent()
    threading.Thread(target=_watch, args=(launcher, launcher == parent), name="launcher", daemon=True).start()


def end_child_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent ends (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def _watch(launcher: int, is_parent: bool) -> None:
    _wait_for_end(launcher, is_parent)
    with contextlib.suppress(OSError, ValueError):
        text = f"the launcher (process {launcher}) has gone: this rank stops, as after SIGTERM"
        print(text, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(pid: int, is_parent: bool) -> None:
    with contextlib.suppress(OSError, AttributeError), os.fdopen(os.pidfd_open(pid)) as process:
        if not is_parent or os.getppid() == pid:  # and not another that has its number
            end = select.poll()
            end.register(process, select.POLLIN)
            end.poll()
        return
    # It has ended already, or this is not Linux.
    while os.getppid() == pid if is_parent else _exists(pid):
        time.sleep(_LOOK_SECONDS)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
