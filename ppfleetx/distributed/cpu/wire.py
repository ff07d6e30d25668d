"""The protocol between two ranks of a CPU job: frames on a TCP connection. A frame is a fixed-size header and
a payload."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
import threading
from typing import NamedTuple

from ppfleetx.config.errors import PeerEndedError

OPERATIONS = (
    "send",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_to_all",
    "barrier",
)
CODES = {name: code for code, name in enumerate(OPERATIONS)}
POINT_TO_POINT = 255  # the "phase" of messages that are not part of a collective

DATA, BYE = range(2)
# kind, operation, dtype, phase, root, group, number, bytes of the operation, bytes of the payload
HEADER = struct.Struct("!BBBBiQQQQ")


class CommError(RuntimeError):
    """An operation between ranks cannot complete."""


class StartError(CommError, PeerEndedError):
    """The rendezvous of the ranks of the job failed."""


class PeerLostError(CommError, PeerEndedError):
    """Another rank that this rank depends on has ended."""


class OutOfStepError(CommError):
    """Two ranks run different operations where they must run the same operation."""


class CommTimeoutError(CommError, PeerEndedError):
    """Nothing arrived within the time limit, although the other rank is alive."""


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
    """Make the header of a frame whose payload has ``length`` bytes."""
    operation, dtype, nbytes, root = signature or (0, 0, 0, -1)
    return HEADER.pack(kind, operation, dtype, phase, root, group, number, nbytes, length)


class Peer:
    """The connection to another rank.

    Attributes:
        name: rank and address, for messages.
        watch: second, idle connection to a rank on another host.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.name = f"rank {rank}"
        self.watch: socket.socket | None = None
        self._sending = threading.Lock()

    def receive(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes. Raises EOFError if the connection is closed."""
        while view.nbytes:
            count = self.connection.recv_into(view, view.nbytes, socket.MSG_WAITALL)
            if count == 0:
                raise EOFError("connection closed")
            view = view[count:]

    def receive_header(self) -> tuple[int, ...]:
        """Receive the next frame's header and return its fields. Raises EOFError if the connection is
        closed."""
        header = bytearray(HEADER.size)
        self.receive(memoryview(header))
        return HEADER.unpack(header)

    def send(self, header: bytes, payload: memoryview | None = None, *, patience: float = -1) -> None:
        """Send one frame. Blocks while the peer's reader thread is busy, and up to ``patience`` seconds (-1:
        no limit) while another thread is sending. Raises OSError."""
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
        """Return the bytes not yet acknowledged by the peer's kernel. A shutdown counts as one byte."""
        count = fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(count, sys.byteorder)
