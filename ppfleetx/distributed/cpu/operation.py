"""Collectives and messages in progress in a CPU process group, and the thread that continues them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable

import numpy as np

from ppfleetx.distributed.cpu.wire import Key, OutOfStepError, Signature


class Receive:
    """A message that an operation waits for. ``view`` is the operation's memory for the message. ``spare`` is
    a buffer for a message that cannot be read into ``view`` directly."""

    __slots__ = ("done", "key", "signature", "spare", "spare_signature", "view")

    def __init__(self, key: Key, signature: Signature, view: memoryview) -> None:
        self.key, self.signature, self.view = key, signature, view
        self.spare: np.ndarray | None = None
        self.spare_signature: Signature | None = None
        self.done = False

    def accepts(self, signature: Signature, nbytes: int) -> bool:
        return self.signature == signature and self.view.nbytes == nbytes


class Inbox:
    """Matches the messages that operations expect with the messages that arrive."""

    def __init__(self, rank: int, state: threading.Condition, pool: BufferPool) -> None:
        self._rank, self._state, self._pool = rank, state, pool
        self._posted: dict[Key, Receive] = {}
        self._arrived: dict[Key, tuple[Signature, np.ndarray]] = {}

    def post(self, wanted: Iterable[tuple[Key, Signature, memoryview]]) -> list[Receive]:
        receives = [Receive(*message) for message in wanted]
        with self._state:
            for receive in receives:
                message = self._arrived.pop(receive.key, None)
                if message is None:
                    self._posted[receive.key] = receive
                else:
                    receive.spare_signature, receive.spare = message
                    receive.done = True
        return receives

    def unpost(self, receives: list[Receive]) -> None:
        with self._state:
            for receive in receives:
                if self._posted.get(receive.key) is receive:
                    del self._posted[receive.key]

    def deliver(self, receive: Receive, text: str) -> None:
        """Copy a received message from its buffer to the memory of the operation that expects it. Does
        nothing if the message was read directly into that memory. Raises OutOfStepError if the message
        belongs to another operation."""
        if receive.spare is None:
            return
        buffer, receive.spare = receive.spare, None
        if receive.spare_signature != receive.signature or buffer.nbytes != receive.view.nbytes:
            raise OutOfStepError(
                f"rank {self._rank}: waiting for rank {receive.key[0]} in {text}: it sent "
                f"{receive.spare_signature} in its place; the ranks do not run the same operations in the "
                "same order"
            )
        if buffer.nbytes:
            np.frombuffer(receive.view, np.uint8)[:] = buffer
        self._pool.release(buffer)

    def receive(
        self, key: Key, signature: Signature, length: int, read: Callable[[memoryview], None]
    ) -> None:
        """Receive an arriving message of ``length`` bytes, by calling ``read`` with the memory to fill. If an
        operation expects the message, it is read into the memory of that operation. Otherwise, or if its type
        or size is wrong, it is read into a buffer."""
        with self._state:
            receive = self._posted.pop(key, None)
        direct = receive is not None and receive.accepts(signature, length)
        buffer = None if direct else self._pool.acquire(length)
        read(receive.view if buffer is None else memoryview(buffer))
        with self._state:
            receive = receive or self._posted.pop(key, None)
            if receive is None:
                self._arrived[key] = (signature, buffer)
                return
            receive.spare, receive.spare_signature, receive.done = buffer, signature, True
            self._state.notify_all()


_SMALL = 1 << 16  # for smaller buffers, allocation is cheaper than a search of the pool


class BufferPool:
    """Keeps byte buffers for reuse, because the page faults of a new 64 MB array take longer than copying the
    array."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> np.ndarray:
        """Return an uninitialized uint8 array of ``nbytes`` bytes."""
        if nbytes < _SMALL:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            fits = [i for i, buffer in enumerate(self._free) if nbytes <= buffer.nbytes <= 2 * nbytes + 4096]
            if fits:
                base = self._free.pop(min(fits, key=lambda i: self._free[i].nbytes))
                self._held -= base.nbytes
                return base[:nbytes]
        return np.empty(nbytes, np.uint8)

    def release(self, buffer: np.ndarray) -> None:
        base = buffer if buffer.base is None else buffer.base
        if not isinstance(base, np.ndarray) or base.nbytes < _SMALL:
            return
        with self._lock:
            if self._held + base.nbytes <= self._limit:
                self._free.append(base)
                self._held += base.nbytes


Steps = Generator[list[Receive], None, None]

MAX_RUNNING_REDUCTIONS = 2
"""Maximum number of reductions of a group that run at the same time. With two, one can send while the other
waits for its messages."""


class Operation:
    """A collective or message in progress, which Paddle uses as a task. The generator ``steps`` runs the
    operation, and yields the messages that must arrive before the operation can continue."""

    def __init__(
        self,
        inbox: Inbox,
        complete: Callable[[Operation], None],
        steps: Steps,
        *,
        text: str,
        group: int,
        background: bool = False,
        is_reduction: bool = False,
    ) -> None:
        self.background, self.is_reduction = background, is_reduction
        # `busy` is set while a thread runs `steps`; change it only while holding Connections.state.
        self.busy = self.started = False
        self.text, self.group = text, group
        self._inbox, self._complete, self._steps = inbox, complete, steps
        self._receives: list[Receive] = []
        self.done = False
        self.failure: BaseException | None = None

    def ready(self) -> bool:
        """Return whether a thread can continue this operation now. False if the operation is done, another
        thread runs it, or a message that it waits for has not arrived."""
        return not self.busy and not self.done and self._has_arrived()

    def _has_arrived(self) -> bool:
        return all(receive.done for receive in self._receives)

    def missing(self) -> list[int]:
        return sorted({receive.key[0] for receive in self._receives if not receive.done})

    def advance(self) -> None:
        """Continue the operation until it ends or has to wait for a message."""
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
        if not self.busy:  # if busy, the thread that advances the operation stops by itself
            self._steps.close()

    # -- task methods called by Paddle

    def wait(self, timeout: float | None = None) -> bool:
        self._complete(self)
        return True

    def is_completed(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._complete(self)


class ProgressThread:
    """A thread that continues the asynchronous operations of all process groups while the program computes.
    It prefers the oldest operation whose messages have arrived, but runs at most
    :data:`MAX_RUNNING_REDUCTIONS` reductions of a group at the same time."""

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
        # A reduction needs memory for the tensors that it receives, so each group runs few at a time. This
        # cannot deadlock, because every member starts its oldest unfinished reduction.
        sums = Counter(one.group for one in background if one.is_reduction and one.started)
        for one in background:
            may_start = not one.is_reduction or sums[one.group] < MAX_RUNNING_REDUCTIONS
            if one.ready() and (one.started or may_start):
                return one
        return None

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._next() is not None)
                operation = self._next()
                operation.busy = True
            with contextlib.suppress(BaseException):  # the thread that waits for the operation raises it
                self._advance(operation)
