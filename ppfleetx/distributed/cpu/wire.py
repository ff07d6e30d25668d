"""The protocol between two ranks of a CPU job: frames on a TCP connection, and direct reads of memory.

A frame is a header of fixed size and a payload. Between ranks on one host, the receiver reads large payloads
straight from the sender's memory (``process_vm_readv(2)``) if the kernel allows it. Everything here concerns
one connection and does not depend on Paddle.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import termios
import threading
from collections import deque
from typing import NamedTuple

import numpy as np

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

DATA, DIRECT, ACK, BYE = range(4)
# kind, operation, dtype, phase, root, group, number, operation's bytes, payload bytes, address
HEADER = struct.Struct("!BBBBiQQQQQ")


class CommError(RuntimeError):
    """An operation between ranks cannot complete."""


class StartError(CommError, PeerEndedError):
    """Not all ranks of the job have met."""


class PeerLostError(CommError, PeerEndedError):
    """A rank that this one depends on has ended."""


class OutOfStepError(CommError):
    """Two ranks run different operations although they must run the same one."""


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
    address: int = 0,
) -> bytes:
    """Make the header of a frame. Its payload has ``length`` bytes at ``address`` of the sender's memory."""
    operation, dtype, nbytes, root = signature or (0, 0, 0, -1)
    return HEADER.pack(kind, operation, dtype, phase, root, group, number, nbytes, length, address)


class Peer:
    """The connection to one rank.

    Attributes:
        name: rank and address, for messages.
        watch: the second, idle connection to a rank on another host.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.name = f"rank {rank}"
        self.watch: socket.socket | None = None
        self.numbering = threading.Lock()  # guards `direct_sent`
        self._sending = threading.Lock()
        self._replies: deque[bytes] = deque()  # frames of the reader thread
        self.pid = 0  # process id of the peer if its memory can be read
        self.direct = False  # whether the peer can read our memory
        self.direct_sent = self.direct_acknowledged = 0

    def receive(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes. Raises EOFError if the connection is closed."""
        while view.nbytes:
            count = self.connection.recv_into(view, view.nbytes, socket.MSG_WAITALL)
            if count == 0:
                raise EOFError("connection closed")
            view = view[count:]

    def receive_header(self) -> tuple[int, ...]:
        """The fields of the next frame's header. Raises EOFError if the connection is closed."""
        header = bytearray(HEADER.size)
        self.receive(memoryview(header))
        return HEADER.unpack(header)

    def send(self, header: bytes, payload: memoryview | None = None, *, patience: float = -1) -> None:
        """Send one frame; this blocks only while the peer's reader thread is busy, and up to ``patience``
        seconds (-1: no limit) for another thread that is sending. Raises OSError."""
        if not self._sending.acquire(timeout=patience):
            raise TimeoutError("another thread is still sending")
        try:
            self._write(header, payload)
        finally:
            self._sending.release()
        self._send_replies()

    def reply(self, frame: bytes) -> None:
        """Send a short frame from a reader thread, which must never wait: two could wait for each other.

        If another thread is sending, it sends this frame next; if the socket is full, a new thread sends it.
        """
        self._replies.append(frame)
        self._send_replies(may_wait=False)

    def _send_replies(self, *, may_wait: bool = True) -> None:
        while self._replies and self._sending.acquire(blocking=False):
            try:
                while self._replies and (may_wait or select.select([], [self.connection], [], 0)[1]):
                    self._write(self._replies.popleft())
            finally:
                self._sending.release()
            if self._replies and not may_wait:
                threading.Thread(target=self._reply_later, name=f"cpu-comm-{self.rank}", daemon=True).start()
                return

    def _reply_later(self) -> None:
        with contextlib.suppress(OSError):  # the reader thread handles a lost connection
            self._send_replies()

    def undelivered(self) -> int:
        """Bytes sent but not yet confirmed by the peer's kernel; a shutdown counts as one."""
        count = fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(count, sys.byteorder)

    def _write(self, header: bytes, payload: memoryview | None = None) -> None:
        parts = [memoryview(header)] if payload is None else [memoryview(header), payload]
        while parts:
            sent = self.connection.sendmsg(parts)
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if parts and sent:
                parts[0] = parts[0][sent:]


# -- memory of another process ----------------------------------------------------------------


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)


def read_memory(pid: int, address: int, view: memoryview) -> None:
    """Fill ``view`` from ``address`` in the memory of process ``pid`` (process_vm_readv(2)). Raises OSError
    if the kernel does not allow it, or the process has ended."""
    target, done = address_of(view), 0
    while done < view.nbytes:
        left = view.nbytes - done
        count = _LIBC.process_vm_readv(
            pid,
            ctypes.byref(_IoVec(target + done, left)),
            ctypes.c_ulong(1),
            ctypes.byref(_IoVec(address + done, left)),
            ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
        done += count


_LIBC.process_vm_readv.restype = ctypes.c_ssize_t


def address_of(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
