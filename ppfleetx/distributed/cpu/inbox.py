"""Match incoming messages with receives.

If the receive has been posted, a reader thread reads the message straight into the receiver's memory;
otherwise it reads into a spare buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np

from ppfleetx.distributed.cpu.wire import Key, OutOfStepError, Signature


class Batch:
    __slots__ = ("remaining",)

    def __init__(self) -> None:
        self.remaining = 0


class Receive:
    """One posted receive. ``spare`` holds the payload if it could not be read straight into ``view``."""

    __slots__ = ("batch", "done", "key", "signature", "spare", "spare_signature", "view")

    def __init__(self, key: Key, signature: Signature, view: memoryview, batch: Batch) -> None:
        self.key, self.signature, self.view, self.batch = key, signature, view, batch
        self.spare: np.ndarray | None = None
        self.spare_signature: Signature | None = None
        self.done = False
        batch.remaining += 1

    def accepts(self, signature: Signature, nbytes: int) -> bool:
        return self.signature == signature and self.view.nbytes == nbytes


class Inbox:
    """Receives that wait for their message, and messages that wait for their receive."""

    def __init__(self, rank: int, state: threading.Condition, pool: BufferPool) -> None:
        self._rank, self._state, self._pool = rank, state, pool
        self._posted: dict[Key, Receive] = {}
        self._arrived: dict[Key, tuple[Signature, np.ndarray]] = {}

    def post(self, wanted: Iterable[tuple[Key, Signature, memoryview]]) -> list[Receive]:
        batch = Batch()
        receives = [Receive(key, signature, view, batch) for key, signature, view in wanted]
        with self._state:
            for receive in receives:
                message = self._arrived.pop(receive.key, None)
                if message is None:
                    self._posted[receive.key] = receive
                else:
                    receive.spare_signature, receive.spare = message
                    receive.done = True
                    batch.remaining -= 1
        return receives

    def unpost(self, receives: list[Receive]) -> None:
        with self._state:
            for receive in receives:
                if self._posted.get(receive.key) is receive:
                    del self._posted[receive.key]

    def deliver(self, receive: Receive, text: str) -> None:
        """Check a payload that arrived before its receive, and move it into place.

        Raises:
            OutOfStepError: the payload belongs to another operation.
        """
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
        """Read the arriving message of ``length`` bytes with ``read``. Reader threads call this."""
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
            receive.batch.remaining -= 1
            if receive.batch.remaining == 0 or not direct:
                self._state.notify_all()


_SMALL = 1 << 16  # below this size a new array is cheaper than searching for an old one


class BufferPool:
    """Recycled byte buffers: the page faults of a fresh 64 MB array cost more than copying it."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> np.ndarray:
        """Return a uint8 array of ``nbytes`` with undefined contents."""
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
