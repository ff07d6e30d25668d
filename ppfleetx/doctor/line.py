"""A connection between two members of a meeting: values, a sign of life every second, what silence means."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

_SEND_SECONDS = 30.0
_LONGEST_LINE = 64 << 20
PULSE_SECONDS = 1.0


class Line:
    """A connection that carries one JSON value a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._read = connection, bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # With a timeout of its own: one thread may wait for a message while another sends.
        self._out, self._lock = connection.dup(), threading.Lock()
        self._out.settimeout(_SEND_SECONDS)

    def send(self, value: Any) -> None:
        with self._lock:
            self._out.sendall(json.dumps(value).encode() + b"\n")

    def close(self) -> None:
        self.connection.close()
        self._out.close()

    def receive(self, deadline: float) -> Any:
        """The next value; TimeoutError at ``deadline`` (monotonic), ConnectionError without the other."""
        while (value := self.waiting()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            self.fill()
        return value

    def fill(self) -> None:
        """Take what has come."""
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed")
        self._read += data
        if len(self._read) > _LONGEST_LINE:
            raise ConnectionAbortedError(errno.EMSGSIZE, "a message that is too long")

    def come(self) -> Iterator[Any]:
        """The values that are here already."""
        self.connection.settimeout(0.0)
        with contextlib.suppress(BlockingIOError):
            self.fill()
        while (value := self.waiting()) is not None:
            yield value

    def waiting(self) -> Any:
        """A value that has come whole, or None."""
        line, end, rest = self._read.partition(b"\n")
        if not end:
            return None
        self._read = rest
        try:
            return json.loads(line)
        except ValueError:
            raise ConnectionAbortedError(errno.EPROTO, "not a message of doctor") from None


class Pulse:
    """Says to the others that this process runs, whatever its main thread does."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines, self._over = list(lines), threading.Event()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(PULSE_SECONDS):
            for line in self._lines:
                with contextlib.suppress(OSError):  # exchange says who is gone
                    line.send({"alive": True})

    def stop(self) -> None:
        self._over.set()


def silence_limit(quiet: float, seconds: float) -> float:
    """No longer than a whole wait, and some beats of a pulse at least."""
    return max(min(quiet, seconds), 3 * PULSE_SECONDS)


def silence(seconds: float, place: str) -> str:
    return (
        f"nothing was heard of it for {seconds:g} s: its process is stopped, or its machine does not answer; "
        f"it was last heard of at: {place}"
    )
