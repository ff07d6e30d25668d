"""Operations in progress, and the thread that advances operations before the program waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator

from ppfleetx.distributed.cpu.inbox import Inbox, Receive

Steps = Generator[list[Receive], None, None]

STARTED_SUMS = 2
"""The most sums of a group in progress: while one waits for its messages, the next one sends."""


class Operation:
    """One operation, written as a generator that yields the receives it needs next.

    A thread that waits for one operation can therefore advance all others, so two ranks may wait for two
    asynchronous operations in different orders. ``busy`` while a thread advances it is changed under the
    mesh's ``state``.
    """

    def __init__(
        self,
        inbox: Inbox,
        complete: Callable[[Operation], None],
        steps: Steps,
        *,
        text: str,
        group: int,
        background: bool = False,
        takes_memory: bool = False,
    ) -> None:
        self.background, self.takes_memory = background, takes_memory
        self.busy = self.started = False
        self.text, self.group = text, group
        self._inbox, self._complete, self._steps = inbox, complete, steps
        self._receives: list[Receive] = []
        self.done = False
        self.failure: BaseException | None = None

    def ready(self) -> bool:
        """Whether a thread may advance this operation now."""
        return not self.busy and not self.done and self._has_arrived()

    def _has_arrived(self) -> bool:
        return all(receive.done for receive in self._receives)

    def missing(self) -> list[int]:
        return sorted({receive.key[0] for receive in self._receives if not receive.done})

    def advance(self) -> None:
        """Run until a receive has to wait for its message."""
        self.started = True
        while not self.done and self._has_arrived():
            for receive in self._receives:
                self._inbox.deliver(receive, self.text)
            try:
                self._receives = next(self._steps)
            except StopIteration:
                self.done, self._receives = True, []

    def withdraw(self, failure: BaseException) -> None:
        self.failure = failure
        self._inbox.unpost(self._receives)
        if not self.busy:  # otherwise the thread that is advancing it will stop by itself
            self._steps.close()

    # -- methods that Paddle calls on a task

    def wait(self, timeout: float | None = None) -> bool:
        self._complete(self)
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_sync(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._complete(self)


class Progress:
    """A thread that advances operations in the background, oldest first.

    Sending and summing release the GIL, so the program computes meanwhile. The thread advances whatever is
    ready in any group, so groups cannot wait for each other in a circle.

    The program may begin any number of operations. At most :data:`STARTED_SUMS` per group of the operations
    that need memory for received data are started, in order; other operations start at once. The oldest
    unfinished operation is started on every member, so it finishes, and then the next one does.
    """

    def __init__(
        self, state: threading.Condition, pending: list[Operation], advance: Callable[[Operation], None]
    ) -> None:
        self._state, self._pending, self._advance = state, pending, advance
        self._thread: threading.Thread | None = None

    def begin(self, operation: Operation) -> None:
        with self._state:
            self._pending.append(operation)
            self._state.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cpu-comm-progress", daemon=True)
                self._thread.start()

    def _next(self) -> Operation | None:
        background = [operation for operation in self._pending if operation.background]
        sums = Counter(one.group for one in background if one.takes_memory and one.started)
        for one in background:
            may_start = not one.takes_memory or sums[one.group] < STARTED_SUMS
            if one.ready() and (one.started or may_start):
                return one
        return None

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._next() is not None)
                operation = self._next()
                operation.busy = True
            with contextlib.suppress(BaseException):  # the thread that waits for the operation gets the error
                self._advance(operation)
