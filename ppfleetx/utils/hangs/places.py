"""Where a thread is, in a few words, from its Python stack."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

_IMPORTS = "<frozen importlib._bootstrap>"
_WAITING_FILES = ("threading.py", "queue.py", "selectors.py", "subprocess.py", "socket.py", "_base.py")


def innermost(frame: FrameType | None) -> str:
    """``file.py:12 in function`` of the innermost call that is no mere waiting of the standard library."""
    while frame is not None and frame.f_back is not None and _is_waiting(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    name = frame.f_code.co_filename.rpartition("/")[2]
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


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
