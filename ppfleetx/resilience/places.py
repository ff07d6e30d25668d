"""Where a thread is, in a few words, from its Python stack."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

_IMPORTS = "<frozen importlib._bootstrap>"
_WAITING_FILES = ("threading.py", "queue.py", "selectors.py", "subprocess.py", "socket.py", "_base.py")
# Files in which the main thread waits for threads that work for it, and how the names of these begin.
_HELPERS = {"loader.py": "data", "background.py": "checkpoint", "together.py": "first-on-node"}
_IDLE = "_worker"  # where a thread of a pool waits for work


def main_place(frame: FrameType | None) -> str:
    """:func:`innermost` of the main thread; when that only waits, of the thread that works for it."""
    own = innermost(frame)
    begins = _HELPERS.get(own.partition(":")[0])
    if begins is None or frame is None or not _is_waiting(frame):
        return own
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name.startswith(begins):
            where = innermost(frames.get(thread.ident or 0))
            if where and not where.endswith(f" in {_IDLE}"):
                return f"{where}, in thread {thread.name}"
    return own


def raised_at(error: BaseException) -> str:
    """``file.py:12 in function`` of where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else _told(trace.tb_frame, trace.tb_lineno)


def innermost(frame: FrameType | None) -> str:
    """``file.py:12 in function`` of the innermost call that is no mere waiting of the standard library."""
    while frame is not None and frame.f_back is not None and _is_waiting(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    return _told(frame, frame.f_lineno)


def _told(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line} in {frame.f_code.co_name}"


def _is_waiting(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith("<") or path.rpartition("/")[2] in _WAITING_FILES


def importing(frame: FrameType | None) -> str | None:
    """The module that is being imported, the innermost one; None: no import is under way."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS and frame.f_code.co_name == "_find_and_load":
            return str(frame.f_locals.get("name"))
        frame = frame.f_back
    return None


def stacks() -> dict[str, list[str]]:
    """The Python stack of each thread, outermost call first, by the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    for ident, frame in sys._current_frames().items():
        lines = [
            f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}".rstrip(": ")
            for entry in traceback.extract_stack(frame)
        ]
        found[f"{names.get(ident, 'unknown')} ({ident})"] = lines
    return found


def main_frame() -> FrameType | None:
    """What the main thread executes."""
    return sys._current_frames().get(threading.main_thread().ident or 0)
