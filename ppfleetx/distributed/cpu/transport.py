"""The connections of one rank of a CPU job to all other ranks, and its running collectives and messages.
Every wait has a time limit, unless the user has turned the limit off (:func:`time_limit`).

``handshake.py`` makes the connections, ``wire.py`` defines the format of messages, ``operation.py`` matches
messages with operations, and ``keepalive.py`` detects lost hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping

from ppfleetx.distributed.cpu.handshake import connect_ranks
from ppfleetx.distributed.cpu.keepalive import HostWatch
from ppfleetx.distributed.cpu.operation import BufferPool, Inbox, Operation, ProgressThread
from ppfleetx.distributed.cpu.wire import (
    BYE,
    DATA,
    CommError,
    CommTimeoutError,
    Peer,
    PeerLostError,
    Signature,
    make_header,
)
from ppfleetx.resilience.flight_recorder import RECORD
from ppfleetx.utils.lost_peers import note_raised, report_lost, seconds_in
from ppfleetx.utils.machine import killed_for_memory

TIMEOUT_VARIABLE = "PADDLE_CPU_COMM_TIMEOUT"
_GOODBYE_SECONDS = 2.0  # for all peers together, in case a peer does not read
_SOCKET_BUFFER = 4 << 20
_POOL_BYTES = 256 << 20
_LONGEST = 2000  # maximum number of characters of an error message sent to other ranks


class Connections:
    """The connections of this rank to all other ranks, and its running collectives and messages.

    Attributes:
        blocked_on: the operation that the program is waiting for, or None.
        engine: the lock that the program's threads hold while they run operations or wait for operations. The
            progress thread does not use it.
        state: the lock that protects all data shared between threads.
    """

    def __init__(self, rank: int, timeout: float, peers: dict[int, Peer]) -> None:
        self.rank, self.timeout, self.peers = rank, timeout, peers
        self.pool = BufferPool(_POOL_BYTES)
        self.state = threading.Condition(threading.Lock())
        self.engine = threading.RLock()
        self.pending: list[Operation] = []
        self.inbox = Inbox(rank, self.state, self.pool)
        self._ended = EndedRanks(rank, {other: peer.name for other, peer in peers.items()})
        self._progress = ProgressThread(self.state, self.pending, self.advance)
        self.blocked_on: Operation | None = None
        self._closed, self._killed_before = False, killed_for_memory()

    # -- connections --------------------------------------------------------------------------

    @classmethod
    def connect(cls, rank: int, world_size: int, *, address: str, timeout: float) -> Connections:
        """Connect this rank to all other ranks of the job. ``address`` is an IP address of this machine that
        the other ranks can reach. ``timeout`` limits each later wait for a rank, in seconds (0: no limit).
        Raises ConfigError or StartError if the ranks cannot connect (:func:`connect_ranks`)."""
        mesh = cls(rank, timeout, connect_ranks(rank, world_size, address))
        mesh._start()
        return mesh

    def _start(self) -> None:
        idle = {rank: peer.watch for rank, peer in self.peers.items() if peer.watch is not None}
        self._watch = HostWatch(idle, lambda rank, reason: self._lose(self.peers[rank], reason))
        for peer in self.peers.values():
            _tune(peer.connection, self.timeout)
            # The thread reads at all times, so that no order of sends and receives can deadlock.
            threading.Thread(
                target=self._read, args=(peer,), name=f"cpu-comm-{peer.rank}", daemon=True
            ).start()
        os.register_at_fork(after_in_child=self._close_in_child)
        atexit.register(self.close)

    def _close_in_child(self) -> None:
        """Close a forked child's copies of the connections, which would otherwise stay open when the parent
        ends."""
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                os.close(peer.connection.detach())
        self._watch.close_in_child()
        self.peers, self._closed = {}, True

    def close(self) -> None:
        """Tell the other ranks that this rank ends, and which error ended it, if any. This usually takes at
        most 2 seconds. It can take longer if several ranks do not read their messages."""
        if self._closed:
            return
        self._closed = True
        with self.state:
            text, lost = self._ended.farewell()
        payload = text.encode()
        frame = make_header(BYE, Signature(0, 0, 0, lost), length=len(payload))
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for peer in self.peers.values():
            left = max(deadline - time.monotonic(), 0.1)
            with contextlib.suppress(OSError):
                _limit_sending(peer.connection, left)
                peer.send(frame + payload, patience=left)
                peer.connection.shutdown(socket.SHUT_WR)
        while time.monotonic() < deadline and self._has_undelivered():
            time.sleep(0.005)

    def _has_undelivered(self) -> bool:
        """Return whether data that this rank sent is still unacknowledged by the operating system of another
        rank."""
        # If this process exited before then, its kernel would answer later messages with a TCP reset, and the
        # other rank's kernel would discard the data.
        with self.state:
            peers = [peer for rank, peer in self.peers.items() if rank not in self._ended]
        with contextlib.suppress(OSError):
            return any(peer.undelivered() for peer in peers)
        return False

    # -- sending ------------------------------------------------------------------------------

    def send(
        self, dst: int, group: int, phase: int, number: int, signature: Signature, view: memoryview
    ) -> None:
        """Send the bytes of ``view`` to rank ``dst``. The caller may overwrite ``view`` afterwards. Raises
        PeerLostError if rank ``dst`` has ended, and CommTimeoutError if rank ``dst`` does not read within the
        time limit."""
        peer = self.peers.get(dst)
        if peer is None:
            raise CommError(f"rank {self.rank}: the connections of this process are closed")
        try:
            peer.send(make_header(DATA, signature, phase, group, number, view.nbytes), view)
        except BlockingIOError as error:  # the socket's send timeout
            text = f"rank {self.rank}: {peer.name} did not take {signature} within {self.timeout:g} s"
            raise note_raised(CommTimeoutError(f"{text}; {TIMEOUT_VARIABLE} sets the limit")) from error
        except OSError as error:
            self._lose(peer, _reason(error))
            with self.state:
                raise self._lost(f"{signature} to rank {dst}", dst) from error

    # -- receiving ----------------------------------------------------------------------------

    def _read(self, peer: Peer) -> None:
        try:
            kind = DATA
            while kind != BYE:
                fields = peer.receive_header()
                self._take(peer, fields)
                kind = fields[0]
        except (OSError, EOFError, MemoryError) as error:
            self._lose(peer, _reason(error))

    def _take(self, peer: Peer, fields: tuple[int, ...]) -> None:
        kind, operation, dtype, phase, root, group, number, nbytes, length = fields
        if kind == DATA:
            key, signature = (peer.rank, group, phase, number), Signature(operation, dtype, nbytes, root)
            self.inbox.receive(key, signature, length, peer.receive)
            return
        text = bytearray(length)
        peer.receive(memoryview(text))
        self._end(lambda: self._ended.add_goodbye(peer.rank, text.decode(errors="replace"), root))

    def _lose(self, peer: Peer, reason: str) -> None:
        if killed_for_memory() > self._killed_before:
            reason += "; meanwhile the kernel has killed a process because memory ran out"
        self._end(lambda: self._ended.add(peer.rank, reason, failed=True))
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that is sending

    def _end(self, record: Callable[[], bool]) -> None:
        with self.state:
            is_first = record()
            self.state.notify_all()
            sentence = self._ended.sentence() if is_first else ""
        if is_first and not self._closed:
            report_lost(sentence, self.close)

    def _lost(self, text: str, rank: int) -> PeerLostError:
        return note_raised(self._ended.error(text, rank))

    # -- running operations -------------------------------------------------------------------

    def launch(self, operation: Operation, *, sync: bool) -> Operation:
        if operation.background:
            self._progress.begin(operation)
            return operation
        with self.engine:
            with self.state:
                self.pending.append(operation)
                operation.busy = True
            self.advance(operation)
        if sync:
            self.complete(operation)
        return operation

    def complete(self, operation: Operation) -> None:
        """Wait until ``operation`` is complete. Meanwhile, continue the program's other operations.

        Raises:
            PeerLostError: a rank that must take part has ended, or any rank of the job has failed.
            OutOfStepError: another rank runs a different operation instead.
            CommTimeoutError: the operation is not complete within the time limit.
        """
        with self.engine:
            deadline = time.monotonic() + self.timeout if self.timeout else float("inf")
            while not operation.done:
                if operation.failure is not None:
                    raise operation.failure
                self._advance_ready(operation)
                if not operation.done and operation.failure is None:
                    try:
                        self._wait(operation, deadline)
                    except BaseException as error:
                        self._drop(operation, error)
                        RECORD.note_failed(operation, error)
                        raise

    def advance(self, operation: Operation) -> None:
        """Continue ``operation`` until it ends or has to wait for a message. The caller must have marked it
        ``busy``."""
        try:
            operation.advance()
        except BaseException as error:
            self._drop(operation, error)
            raise
        finally:
            with self.state:
                operation.busy = False
                if operation.done and operation in self.pending:
                    self.pending.remove(operation)
                self.state.notify_all()

    def _advance_ready(self, wanted: Operation) -> None:
        with self.state:
            mine = [o for o in self.pending if o is wanted or not o.background]
        for operation in mine:
            with self.state:
                if not operation.ready():
                    continue
                operation.busy = True
            self.advance(operation)

    def _drop(self, operation: Operation, error: BaseException) -> None:
        with self.state:
            if operation in self.pending:
                self.pending.remove(operation)
        operation.withdraw(error)

    def _wait(self, operation: Operation, deadline: float) -> None:
        began, self.blocked_on = time.monotonic(), operation
        try:
            with self.state:
                left = min(deadline - began, threading.TIMEOUT_MAX)
                if not self.state.wait_for(lambda: self._is_woken(operation), left):
                    waited_for = ", ".join(self.peers[rank].name for rank in operation.missing())
                    text = f"rank {self.rank}: waited {self.timeout:g} s for {waited_for} in {operation.text}"
                    raise note_raised(CommTimeoutError(f"{text}; {TIMEOUT_VARIABLE} sets the limit"))
                if not self._can_continue(operation):
                    gone = [rank for rank in operation.missing() if rank in self._ended]
                    raise self._lost(operation.text, (*gone, *operation.missing(), -1)[0])
        finally:
            self.blocked_on = None
            RECORD.waited += time.monotonic() - began

    def _can_continue(self, operation: Operation) -> bool:
        """Return whether the thread that waits for ``operation`` has something to do: ``operation`` has
        ended, or it or another operation is ready to continue. The caller must hold the lock ``state``."""
        if operation.done or operation.failure is not None:
            return True
        return any(o.ready() for o in self.pending if o is operation or not o.background)

    def _is_woken(self, operation: Operation) -> bool:
        if self._can_continue(operation):
            return True
        if operation.busy:  # another thread advances the operation and will find the error
            return False
        return self._ended.is_broken or any(rank in self._ended for rank in operation.missing())


class EndedRanks:
    """Records which other ranks have ended and why, and which of them failed first. Use this object only
    while holding the lock ``Connections.state``."""

    def __init__(self, rank: int, names: Mapping[int, str]) -> None:
        self._rank, self._names = rank, names
        self._reasons: dict[int, str] = {}
        self._cause: tuple[int, str] | None = None  # the first rank that failed, and the reason

    def __contains__(self, rank: int) -> bool:
        return rank in self._reasons

    @property
    def is_broken(self) -> bool:
        return self._cause is not None

    def add(self, rank: int, reason: str, *, failed: bool) -> bool:
        """Record that ``rank`` has ended, with the ``reason``, and whether it ``failed``. Returns whether
        this is the first failure recorded here."""
        if rank in self._reasons:
            return False
        self._reasons[rank] = reason
        if not failed or self.is_broken:
            return False
        self._cause = rank, reason
        return True

    def add_goodbye(self, rank: int, text: str, lost: int) -> bool:
        """Record the closing message of ``rank``. ``text`` is the error that ended ``rank`` ("" if none).
        ``lost`` is the rank whose end caused that error (-1 if none). Returns whether this is the first
        failure recorded here."""
        if lost < 0 or lost == self._rank:
            if lost == self._rank:
                text = f"it lost the connection to this rank: {text}"
            return self.add(rank, text or "it has ended", failed=bool(text))
        is_first = not self.is_broken
        if is_first:  # the lost rank is the cause, even if this rank is still connected to it
            self._cause = lost, f"{text} (says {self._names[rank]})"
        self.add(rank, f"it ended because {self._names[lost]} is gone", failed=False)
        return is_first

    def sentence(self) -> str:
        """Return a sentence that says which rank failed first and why. Call this only after a rank has
        failed."""
        assert self._cause is not None
        rank, reason = self._cause
        return f"rank {self._rank}: {self._names[rank]} is gone: {reason}"

    def error(self, text: str, rank: int) -> PeerLostError:
        """Return a PeerLostError for an operation that cannot complete. ``text`` describes the operation, and
        ``rank`` is the rank whose end prevents it (-1: unknown). The message names the rank that failed
        first."""
        cause, reason = self._cause or (rank, self._reasons[rank])
        waiting = "" if rank in (cause, -1) else f" (waiting for rank {rank})"
        return PeerLostError(f"rank {self._rank}: in {text}{waiting}: {self._names[cause]} is gone: {reason}")

    def farewell(self) -> tuple[str, int]:
        """Return the contents of the closing message to the other ranks: the error that ended this process
        ("" if none), and the rank whose end caused the error (-1 if none)."""
        if self._cause is not None:
            return self._cause[1][:_LONGEST], self._cause[0]
        failure = getattr(sys, "last_value", None)  # the uncaught exception that Python prints at exit
        if failure is None:
            return "", -1
        return f"it failed with {type(failure).__name__}: {failure}"[:_LONGEST], -1


def time_limit() -> float:
    """Return how many seconds a rank waits for another rank (``PADDLE_CPU_COMM_TIMEOUT``, default 1800; 0: no
    limit). Raises ConfigError if the variable is not a number of at least 0."""
    return seconds_in(TIMEOUT_VARIABLE, 1800.0)


def _tune(connection: socket.socket, timeout: float) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    if timeout:
        _limit_sending(connection, timeout)


def _limit_sending(connection: socket.socket, seconds: float) -> None:
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
