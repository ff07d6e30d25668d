"""The thread in which collectives advance that the program does not wait for yet."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable

from ppfleetx.distributed.cpu.operation import Operation

STARTED_SUMS = 2
"""Sums of a group that have been started and have not ended: while one waits for what it receives, the next
one sends."""


class Progress:
    """Advances operations in the background, those first that were begun first.

    Sending, and adding up what has come, release Python's lock: the program computes meanwhile. A rank's
    thread advances what is ready of any group, so groups cannot wait for each other in a circle.

    The program may begin as many as it likes. Of those that take memory for what they receive, only
    :data:`STARTED_SUMS` of a group are started, in their order; what only sends, or receives in its place, is
    not held up. Of all such operations that have not ended the first one is started on every member, so it
    ends, then the next one does.

    Args:
        state: lock of what all threads share; its waiters are told when receives are complete.
        pending: all operations under way, of which those in the background are this thread's.
        advance: advances an operation that has been made ``busy``.
    """

    def __init__(
        self, state: threading.Condition, pending: list[Operation], advance: Callable[[Operation], None]
    ) -> None:
        self._state, self._pending, self._advance = state, pending, advance
        self._thread: threading.Thread | None = None

    def begin(self, operation: Operation) -> None:
        """Take an operation over; returns at once."""
        with self._state:
            self._pending.append(operation)
            self._state.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cpu-comm-progress", daemon=True)
                self._thread.start()

    def _next(self) -> Operation | None:
        started = Counter(o.group for o in self._pending if o.background and o.takes_memory and o.started)
        for operation in self._pending:
            if operation.background and operation.ready() and self._may_go_on(operation, started):
                return operation
        return None

    @staticmethod
    def _may_go_on(operation: Operation, started: Counter[int]) -> bool:
        return operation.started or not operation.takes_memory or started[operation.group] < STARTED_SUMS

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._next() is not None)
                operation = self._next()
                operation.busy = True
            # Whoever waits for the operation is given the error.
            with contextlib.suppress(BaseException):
                self._advance(operation)
