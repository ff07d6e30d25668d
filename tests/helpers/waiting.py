"""Wait for a condition, with a limit."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable


def wait_for(
    condition: Callable[[], object],
    seconds: float = 30.0,
    *,
    running: Iterable[subprocess.Popen] = (),
    what: str = "it did not happen in time",
) -> None:
    """Wait until ``condition()`` is true; fail after so many seconds, or when a ``running`` process ends."""
    processes, deadline = list(running), time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        codes = [process.poll() for process in processes]
        assert codes == [None] * len(codes), f"ended with {codes}"
        time.sleep(0.01)
