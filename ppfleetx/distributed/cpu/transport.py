"""The connections of one rank of a CPU job, and its operations in progress. Every wait has a time limit.

Each pair of ranks has one connection, shared by all process groups. One reader thread per connection drains
it for the life of the process. A send therefore never waits for the receiver's program, and no order of sends
and receives can deadlock. Collectives with ``sync_op=False`` run in another thread (``operation.py``), so
their messages travel while the program computes.

``handshake.py`` makes the connections, ``wire.py`` defines their frames, and ``inbox.py`` matches messages
with receives. ``peer_status.py`` asks silent ranks what they are doing; it and ``watch.py`` keep track of
lost ranks. None of these modules depends on Paddle: they handle memory as ``memoryview`` and NumPy arrays.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from ppfleetx.distributed.cpu.handshake import connect_ranks
from ppfleetx.distributed.cpu.inbox import BufferPool, Inbox
from ppfleetx.distributed.cpu.operation import Operation, Progress
from ppfleetx.distributed.cpu.peer_status import EndedRanks, Inquiry
from ppfleetx.distributed.cpu.watch import Watch
from ppfleetx.distributed.cpu.wire import (
    ACK,
    BYE,
    DATA,
    DIRECT,
    QUERY,
    STATE,
    CommError,
    CommTimeoutError,
    Peer,
    PeerLostError,
    Signature,
    address_of,
    make_header,
    read_memory,
)
from ppfleetx.resilience.flight_recorder import RECORD
from ppfleetx.utils.machine import killed_for_memory
from ppfleetx.utils.peers import note_raised, report_lost, seconds_in

TIMEOUT_VARIABLE = "PADDLE_CPU_COMM_TIMEOUT"
DIRECT_BYTES = 1 << 16  # below this size a copy through the socket is faster than the acknowledgement
STALL_SECONDS = 2.0  # how long a rank waits before it asks the others what they are doing
_GOODBYE_SECONDS = 2.0  # for all peers together, in case one does not read
_SOCKET_BUFFER = 4 << 20
_POOL_BYTES = 256 << 20


class Mesh:
    """This rank's connections to all others, and its operations in progress."""

    def __init__(self, rank: int, timeout: float, peers: dict[int, Peer]) -> None:
        self.rank, self.timeout, self.peers = rank, timeout, peers
        self.pool = BufferPool(_POOL_BYTES)
        self.state = threading.Condition(threading.Lock())
        self.engine = threading.RLock()
        self.pending: list[Operation] = []
        self.inbox = Inbox(rank, self.state, self.pool)
        self._ended = EndedRanks(rank, {other: peer.name for other, peer in peers.items()})
        self._progress = Progress(self.state, self.pending, self.advance)
        self._inquiry = Inquiry(rank, peers, self.state, self.pending)
        self._closed, self._killed_before = False, killed_for_memory()

    @property
    def blocked_on(self) -> Operation | None:
        """The operation the program is waiting for."""
        return self._inquiry.blocked

    # -- connections --------------------------------------------------------------------------

    @classmethod
    def connect(cls, rank: int, world_size: int, *, address: str, timeout: float) -> Mesh:
        """Connect this rank to all others in the job.

        Args:
            address: see :func:`connect_ranks`.
            timeout: the time limit of every later wait in seconds; 0 for none.

        Raises:
            ConfigError, StartError: see :func:`connect_ranks`.
        """
        mesh = cls(rank, timeout, connect_ranks(rank, world_size, address))
        mesh._start()
        return mesh

    def _start(self) -> None:
        idle = {rank: peer.watch for rank, peer in self.peers.items() if peer.watch is not None}
        self._watch = Watch(idle, lambda rank, reason: self._lose(self.peers[rank], reason))
        for peer in self.peers.values():
            _tune(peer.connection, self.timeout)
            threading.Thread(
                target=self._read, args=(peer,), name=f"cpu-comm-{peer.rank}", daemon=True
            ).start()
        os.register_at_fork(after_in_child=self._abandon)
        atexit.register(self.close)

    def _abandon(self) -> None:
        """Close the sockets in a forked child (a data loader's worker); otherwise a dead parent would seem
        alive.
        """
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                os.close(peer.connection.detach())
        self._watch.close_in_child()
        self.peers, self._closed = {}, True

    def close(self) -> None:
        """Say goodbye: tell the others that this rank has ended, and whether it failed."""
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
        """Whether a peer's kernel has not yet confirmed everything sent to it.

        If the process ended now, its kernel would answer messages that still arrive with a reset, and data in
        flight would be lost, including the goodbye.
        """
        with self.state:
            peers = [peer for rank, peer in self.peers.items() if rank not in self._ended]
        with contextlib.suppress(OSError):
            return any(peer.undelivered() for peer in peers)
        return False

    # -- sending ------------------------------------------------------------------------------

    def send(
        self, dst: int, group: int, phase: int, number: int, signature: Signature, view: memoryview
    ) -> Callable[[], None] | None:
        """Send ``view``. Call the returned function before changing its memory; if it is None, change it at
        any time.

        Raises:
            PeerLostError: the connection is gone.
            CommTimeoutError: the peer no longer reads.
        """
        peer = self.peers.get(dst)
        if peer is None:
            raise CommError(f"rank {self.rank}: the connections of this process are closed")
        try:
            if not peer.direct or view.nbytes < DIRECT_BYTES:
                with peer.counting:
                    peer.frames_sent += 1
                peer.send(make_header(DATA, signature, phase, group, number, view.nbytes), view)
                return None
            with peer.counting:  # the peer acknowledges frames in order, so tickets must be in order too
                peer.frames_sent += 1
                peer.direct_sent += 1
                ticket = peer.direct_sent
                address = address_of(view)
                peer.send(make_header(DIRECT, signature, phase, group, number, view.nbytes, address))
        except BlockingIOError as error:  # the socket's time limit
            raise self._not_taken(peer, signature) from error
        except OSError as error:
            self._lose(peer, _reason(error))
            with self.state:
                raise self._lost(f"{signature} to rank {dst}", dst) from error
        return lambda: self._await_read(peer, ticket, signature, view)

    def notify(self, dst: int, group: int, phase: int, number: int, signature: Signature) -> None:
        """Send a message without payload. If ``dst`` has ended, do nothing."""
        peer = self.peers.get(dst)
        with self.state:
            if peer is None or dst in self._ended:
                return
        with peer.counting:
            peer.frames_sent += 1
        with contextlib.suppress(OSError):  # the reader thread handles a lost connection
            peer.send(make_header(DATA, signature, phase, group, number))

    def _await_read(self, peer: Peer, ticket: int, signature: Signature, view: memoryview) -> None:
        """Wait until the reader thread of the peer has read ``view``."""
        deadline = time.monotonic() + self.timeout if self.timeout else float("inf")
        with self.state:
            while peer.direct_acknowledged < ticket:
                if peer.rank in self._ended:
                    raise self._lost(f"{signature} to rank {peer.rank}", peer.rank)
                if time.monotonic() > deadline:
                    raise self._not_taken(peer, signature)
                self.state.wait(STALL_SECONDS)

    def _not_taken(self, peer: Peer, signature: Signature) -> CommTimeoutError:
        text = f"rank {self.rank}: {peer.name} did not take {signature} within {self.timeout:g} s"
        return note_raised(CommTimeoutError(f"{text}; {TIMEOUT_VARIABLE} sets the limit"))

    # -- receiving ----------------------------------------------------------------------------

    def _read(self, peer: Peer) -> None:
        try:
            is_last = False
            while not is_last:
                fields = peer.receive_header()
                if fields[0] in (DATA, DIRECT):
                    self._take(peer, fields)
                else:
                    is_last = self._take_control(peer, fields)
        except (OSError, EOFError, MemoryError) as error:
            self._lose(peer, _reason(error))

    def _take(self, peer: Peer, fields: tuple[int, ...]) -> None:
        kind, operation, dtype, phase, root, group, number, nbytes, length, address = fields

        def read(view: memoryview) -> None:
            if kind == DIRECT:
                read_memory(peer.pid, address, view)
                peer.reply(make_header(ACK))
            else:
                peer.receive(view)
            peer.frames_received += 1

        key, signature = (peer.rank, group, phase, number), Signature(operation, dtype, nbytes, root)
        self.inbox.receive(key, signature, length, read)

    def _take_control(self, peer: Peer, fields: tuple[int, ...]) -> bool:
        """Handle a frame that is not data. Returns whether it was the last one."""
        kind, operation, dtype, phase, root, group, number, nbytes, length, extra = fields
        signature = Signature(operation, dtype, nbytes, root)
        text = bytearray(length)
        peer.receive(memoryview(text))
        if kind == QUERY:
            self._inquiry.answer(peer, group, number, phase)
            return False
        with self.state:
            if kind == ACK:
                peer.direct_acknowledged += 1
            elif kind == STATE:
                self._inquiry.record_answer(peer, signature, phase, number, extra, text.decode())
            self.state.notify_all()
        if kind == BYE:
            self._end(lambda: self._ended.add_goodbye(peer.rank, text.decode(errors="replace"), root))
        return kind == BYE

    def _lose(self, peer: Peer, reason: str) -> None:
        """Record that ``peer`` left without a goodbye."""
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
        """Start an operation; with ``sync``, also complete it."""
        if operation.number >= 0:
            self._inquiry.remember(operation)
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
        """Wait for ``operation``, and advance the program's other operations meanwhile.

        Raises:
            PeerLostError, OutOfStepError, CommTimeoutError: the operation cannot complete. The message names
                the missing rank and the operations.
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
        """Advance an operation that this thread has marked ``busy``, and remove it when it is done.

        Raises:
            CommError: the operation failed. It keeps the error for the thread that waits for it.
        """
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
        """Wait until a pending operation can advance."""
        suspicion, began = 0, time.monotonic()
        self._inquiry.begin(operation)
        try:
            while True:
                with self.state:
                    if self.state.wait_for(
                        self._woken, min(STALL_SECONDS, max(deadline - time.monotonic(), 0))
                    ):
                        if self._can_go_on(operation):
                            return
                        self._check_lost(operation)
                    if time.monotonic() >= deadline:
                        waited_for = self._inquiry.describe(operation)
                        text = f"rank {self.rank}: waited {self.timeout:g} s for {waited_for}"
                        raise note_raised(CommTimeoutError(f"{text}; {TIMEOUT_VARIABLE} sets the limit"))
                    suspicion = self._inquiry.judge(operation, suspicion)
                self._inquiry.ask(operation, self._ended)
                self._sleep_unless_ready(operation)
        finally:
            self._inquiry.end()
            RECORD.waited += time.monotonic() - began

    def _can_go_on(self, operation: Operation) -> bool:
        """Whether ``operation`` is over or any operation can advance; the caller holds ``state``."""
        if operation.done or operation.failure is not None:
            return True
        return any(o.ready() for o in self.pending if o is operation or not o.background)

    def _woken(self) -> bool:
        blocked = self._inquiry.blocked
        if self._can_go_on(blocked):
            return True
        if blocked.busy:  # another thread is advancing it and will find the error
            return False
        return self._ended.is_broken or any(rank in self._ended for rank in self._inquiry.blocked.missing())

    def _sleep_unless_ready(self, operation: Operation) -> None:
        """Give the other ranks' answers time to arrive, unless an operation is ready."""
        with self.state:
            self.state.wait_for(lambda: self._can_go_on(operation), 0.05)

    def _check_lost(self, operation: Operation) -> None:
        missing = operation.missing()
        gone = [rank for rank in missing if rank in self._ended]
        if gone or self._ended.is_broken:
            raise self._lost(operation.text, (*gone, *missing, -1)[0])


def time_limit() -> float:
    """The time limit of any wait in seconds (``PADDLE_CPU_COMM_TIMEOUT``, default 1800, 0 for none).

    Raises:
        ConfigError: the variable is not a number of at least 0.
    """
    return seconds_in(TIMEOUT_VARIABLE, 1800.0)


def _tune(connection: socket.socket, timeout: float) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    if timeout:
        _limit_sending(connection, timeout)


def _limit_sending(connection: socket.socket, seconds: float) -> None:
    """Limit how long a sending thread waits for the peer's reader."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
