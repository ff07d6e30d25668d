"""The format of messages between two ranks of a CPU job: a header of fixed size, then the payload."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
import threading
from typing import NamedTuple

from ppfleetx.config.errors import PeerEndedError
from ppfleetx.resilience.flight_recorder import OPERATIONS as METHODS
from ppfleetx.resilience.flight_recorder import operation_of

OPERATIONS = tuple(dict.fromkeys(map(operation_of, METHODS)))
CODES = {name: code for code, name in enumerate(OPERATIONS)}
POINT_TO_POINT = 255  # the "phase" of messages that are not part of a collective

DATA, BYE = range(2)
# kind, operation, dtype, phase, root, group, number, bytes of the operation, bytes of the payload
HEADER = struct.Struct("!BBBBiQQQQ")


class CommError(RuntimeError):
    """Raised when a collective or message between ranks cannot complete."""


class StartError(CommError, PeerEndedError):
    """Raised when the ranks of a CPU job cannot connect to each other at the start of the job."""


class PeerLostError(CommError, PeerEndedError):
    """Raised when a collective or message cannot complete because another rank has ended."""


class OutOfStepError(CommError):
    """Raised when another rank runs a different operation than this rank, or the same operation with other
    sizes."""


class CommTimeoutError(CommError, PeerEndedError):
    """Raised when another rank has sent or read nothing within the time limit, although its connection is
    open."""


class Signature(NamedTuple):
    operation: int
    dtype: int
    nbytes: int
    root: int

    def __str__(self) -> str:
        root = f", root {self.root}" if self.root >= 0 else ""
        return f"{OPERATIONS[self.operation]} ({self.nbytes} bytes{root})"


Key = tuple[int, int, int, int]
"""Identifies a message: source rank, group, phase, number."""


def make_header(
    kind: int,
    signature: Signature | None = None,
    phase: int = 0,
    group: int = 0,
    number: int = 0,
    length: int = 0,
) -> bytes:
    """Return the header of a message whose payload has ``length`` bytes."""
    operation, dtype, nbytes, root = signature or (0, 0, 0, -1)
    return HEADER.pack(kind, operation, dtype, phase, root, group, number, nbytes, length)


class Peer:
    """The connection to another rank. ``name`` is that rank and its address, for error messages. ``watch`` is
    a second, idle connection if that rank is on another host, and None if it is on this host."""

    def __init__(self, rank: int, connection: socket.socket, name: str) -> None:
        self.rank, self.connection, self.name = rank, connection, name
        self.watch: socket.socket | None = None
        self._sending = threading.Lock()

    def receive(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes from the connection. Raises EOFError if the connection is
        closed."""
        while view.nbytes:
            count = self.connection.recv_into(view, view.nbytes, socket.MSG_WAITALL)
            if count == 0:
                raise EOFError("connection closed")
            view = view[count:]

    def receive_header(self) -> tuple[int, ...]:
        """Receive the next header and return its fields. Raises EOFError if the connection is closed."""
        header = bytearray(HEADER.size)
        self.receive(memoryview(header))
        return HEADER.unpack(header)

    def send(self, header: bytes, payload: memoryview | None = None, *, patience: float = -1) -> None:
        """Send one message: ``header``, then ``payload``. ``patience`` is the number of seconds to wait while
        another thread is sending (-1: no limit). Raises OSError if the message cannot be sent."""
        if not self._sending.acquire(timeout=patience):
            raise TimeoutError("another thread is still sending")
        parts = [memoryview(header)] if payload is None else [memoryview(header), payload]
        try:
            while parts:
                sent = self.connection.sendmsg(parts)
                while parts and sent >= parts[0].nbytes:
                    sent -= parts.pop(0).nbytes
                if parts and sent:
                    parts[0] = parts[0][sent:]
        finally:
            self._sending.release()

    def undelivered(self) -> int:
        """Return the number of sent bytes that the operating system of the other rank has not yet
        acknowledged. Shutting down the connection counts as one byte."""
        count = fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(count, sys.byteorder)
