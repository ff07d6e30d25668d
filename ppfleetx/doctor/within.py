"""Wait for what may never come: a file system, a name server or a driver that does not answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, act: Callable[[], Result]) -> Result:
    """What ``act`` gives, called in a thread of its own, which is left behind where it does not end.

    Raises:
        TimeoutError: it has not ended in time.
        Exception: whatever it raises.
    """
    answers: queue.SimpleQueue[tuple[Result | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((act(), None))
        except Exception as error:  # noqa: BLE001  (raised again by who waits)
            answers.put((None, error))

    threading.Thread(target=run, name="within", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result
