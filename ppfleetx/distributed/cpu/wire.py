"""What passes between two ranks of a CPU job: frames on a TCP connection, and memory read directly.

A frame is a header of fixed size and a payload. A long payload leaves in parts, and short frames between
them: a sum of a few numbers does not wait for all that has been given to a slow link before it. Between ranks
on one host large payloads are read straight from the sender's memory (``process_vm_readv(2)``) where the
kernel allows it. Everything here knows one connection only; nothing knows Paddle.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
import termios
import threading
from collections import deque
from collections.abc import Iterator
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
POINT_TO_POINT = 255  # the "phase" of messages that are not part of a collective
ENDED = 254  # and of those, without payload, that tell of the end of a sum

DATA, DIRECT, ACK, QUERY, STATE, BYE, PART = range(7)
# kind, operation, dtype, phase, root, group, number, operation's bytes, payload bytes, address
HEADER = struct.Struct("!BBBBiQQQQQ")

SHORT_BYTES = 1 << 16
"""Up to here a payload is part of its frame; a longer one follows the header in frames of kind PART."""
PART_BYTES = 1 << 19


class CommError(RuntimeError):
    """A communication that cannot complete."""


class StartError(CommError, PeerEndedError):
    """The ranks of the job have not all met."""


class PeerLostError(CommError, PeerEndedError):
    """A rank this one depends on has ended."""


class OutOfStepError(CommError):
    """Two ranks run different operations where they must run the same."""


class CommTimeoutError(CommError, PeerEndedError):
    """Nothing came for as long as the limit allows: the rank waited for lives, but does not answer."""


class Signature(NamedTuple):
    """What every participant of one operation must agree on."""

    operation: int
    dtype: int
    nbytes: int
    root: int

    def __str__(self) -> str:
        root = f", root {self.root}" if self.root >= 0 else ""
        return f"{OPERATIONS[self.operation]} ({self.nbytes} bytes{root})"


Key = tuple[int, int, int, int]
"""Whose message it is: source rank, group, phase, number."""


def make_header(
    kind: int,
    signature: Signature | None = None,
    phase: int = 0,
    group: int = 0,
    number: int = 0,
    length: int = 0,
    address: int = 0,
) -> bytes:
    """A frame's header; ``length`` is that of the payload, ``address`` where the sender holds it."""
    operation, dtype, nbytes, root = signature or (0, 0, 0, -1)
    return HEADER.pack(kind, operation, dtype, phase, root, group, number, nbytes, length, address)


class Peer:
    """The connection to one rank.

    Attributes:
        name: which rank it is and where, for people.
        watch: a second, idle connection to a rank on another host.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.name = f"rank {rank}"
        self.watch: socket.socket | None = None
        self.counting = threading.Lock()  # of the counters below that senders change
        self._sending = threading.Lock()  # of one frame
        self._sending_long = threading.Lock()  # of one long payload, held before the other one
        self._short: deque[memoryview] = deque()  # frames that are to leave before any other
        self.pid = 0  # of the peer, where its memory can be read
        self.direct = False  # whether the peer reads ours
        self.direct_sent = self.direct_acknowledged = 0
        self.frames_sent = self.frames_received = 0
        self.wire_bytes = 0

    def receive(self, view: memoryview) -> None:
        """Fill ``view``.

        Raises:
            EOFError: the connection is closed.
        """
        while view.nbytes:
            count = self.connection.recv_into(view, view.nbytes, socket.MSG_WAITALL)
            if count == 0:
                raise EOFError("connection closed")
            view = view[count:]

    def receive_header(self) -> tuple[int, ...]:
        """The fields of the next frame's header.

        Raises:
            EOFError: the connection is closed.
        """
        header = bytearray(HEADER.size)
        self.receive(memoryview(header))
        return HEADER.unpack(header)

    def send(self, header: bytes, payload: memoryview | None = None) -> None:
        """Send one frame; blocks only while the peer's reader thread is busy.

        A short one that another thread's long one is in front of has been copied, and leaves after the
        part that is on its way.

        Raises:
            OSError: the connection is gone.
        """
        if payload is None or payload.nbytes <= SHORT_BYTES:
            self._short.append(memoryview(header if payload is None else b"".join((header, payload))))
            self._flush()
            return
        with self._sending_long:
            self._write(header)
            while payload.nbytes:
                part, payload = payload[:PART_BYTES], payload[PART_BYTES:]
                self._write(make_header(PART, length=part.nbytes), part)

    def send_control(self, frame: bytes) -> None:
        """Send a short frame from a reader thread, which must never wait: who is to read waits like it."""
        self._short.append(memoryview(frame))
        try:
            self._flush(socket.MSG_DONTWAIT)
        except BlockingIOError:
            threading.Thread(target=self._flush_later, name=f"cpu-comm-send-{self.rank}", daemon=True).start()

    def send_last(self, frame: bytes, patience: float) -> None:
        """Send the last frame, behind all others.

        Args:
            patience: seconds to wait for each of the other threads that may be sending.

        Raises:
            OSError: the connection is gone, or another thread did not end in time.
        """
        with _held(self._sending_long, patience), _held(self._sending, patience):
            self._drain()
            self._put([memoryview(frame)])

    def undelivered(self) -> int:
        """Bytes that have been sent and not been confirmed by the peer's kernel; a shutdown counts as one."""
        count = fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(count, sys.byteorder)

    def _write(self, header: bytes, payload: memoryview | None = None) -> None:
        with self._sending:
            self._drain()
            self._put([memoryview(header)] if payload is None else [memoryview(header), payload])
        self._flush()

    def _flush(self, flags: int = 0) -> None:
        """Let the short frames leave, unless another thread is sending: it does so then."""
        while self._short and self._sending.acquire(blocking=False):
            try:
                self._drain(flags)
            finally:
                self._sending.release()

    def _flush_later(self) -> None:
        with contextlib.suppress(OSError):  # the reader thread finds out, and says so
            with self._sending:
                self._drain()
            self._flush()  # what came between the last look and the end of the lock

    def _drain(self, flags: int = 0) -> None:
        while self._short:
            sent = self.connection.send(self._short[0], flags)
            self.wire_bytes += sent
            if sent == self._short[0].nbytes:
                self._short.popleft()
            else:  # the rest has to leave before anything else does
                self._short[0] = self._short[0][sent:]

    def _put(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self.connection.sendmsg(parts)
            self.wire_bytes += sent
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if parts and sent:
                parts[0] = parts[0][sent:]


@contextlib.contextmanager
def _held(lock: threading.Lock, patience: float) -> Iterator[None]:
    if not lock.acquire(timeout=patience):
        raise TimeoutError("another thread is still sending")
    try:
        yield
    finally:
        lock.release()


# -- memory of another process ----------------------------------------------------------------


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)


def read_memory(pid: int, address: int, view: memoryview) -> None:
    """Copy ``view.nbytes`` bytes at ``address`` of process ``pid`` to ``view`` (process_vm_readv(2)).

    Raises:
        OSError: the kernel does not allow it, or the process has ended.
    """
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
