"""Let SIGTERM, SIGHUP (the terminal is gone) and Ctrl-C stop a training run only after the current step, and
all ranks after the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

from ppfleetx.utils.end_processes import stop_signals
from ppfleetx.utils.launcher_env import is_rank


class StopRequest:
    """Context manager in which SIGTERM, SIGHUP and Ctrl-C only request that the run stop after the current
    step. Ctrl-C after an earlier signal ends the process. An ignored SIGHUP (``nohup``) stays ignored. The
    object is true once :meth:`agree` has decided that the run must stop."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._agreed = False
        self._previous: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self._agreed

    def agree(self, requested: object) -> bool:
        """Record and return whether the run must stop. ``requested`` says whether any rank has received a
        signal. All ranks must pass the same value."""
        # The ranks get signals at different moments but must stop after the same step.
        self._agreed = self._agreed or bool(requested)
        return self._agreed

    def __enter__(self) -> Self:
        # Python delivers signals only to the main thread; in other threads the host program handles them.
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if is_rank() and (self or self.signal_name) and self._previous:
            # The launcher sends SIGTERM to each rank in turn, up to three times. It must not kill a rank that
            # is exiting.
            self._previous[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in self._previous.items():
            # Python cannot restore a handler installed from C++ (as Paddle does).
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
