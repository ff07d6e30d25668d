"""Messages between the ranks of a CPU job: authenticated TCP connections and waits that end.

One connection per pair of ranks, made once and shared by every process group. A reader thread per
connection drains it for as long as the process lives, into the receiver's own memory where the receive
is already posted and into a spare buffer where it is not, so a send never waits for the receiver's
program and no order of sends and receives can deadlock. Between ranks on one host large payloads are
read straight from the sender's memory (``process_vm_readv(2)``) where the kernel allows it.

Nothing in this file knows Paddle: memory is ``memoryview`` and NumPy.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import hmac
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from ppfleetx.config.errors import PeerEndedError

TIMEOUT_VARIABLE = "PADDLE_CPU_COMM_TIMEOUT"
DIRECT_VARIABLE = "PADDLE_CPU_COMM_DIRECT"
DIRECT_BYTES = 1 << 16  # below this a copy through the socket is faster than the acknowledgement
STALL_SECONDS = 2.0  # how long a rank waits before it asks the others what they are doing
HANDSHAKE_SECONDS = 30.0
START_SECONDS = 300.0  # how far apart the ranks of a job may start
_SOCKET_BUFFER = 4 << 20
_POOL_BYTES = 256 << 20

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

_DATA, _DIRECT, _ACK, _QUERY, _STATE, _BYE = range(6)
# kind, operation, dtype, phase, root, group, number, operation's bytes, payload bytes, address
_HEADER = struct.Struct("!BBBBiQQQQQ")


class CommError(RuntimeError):
    """A communication that cannot complete."""


class PeerLostError(CommError, PeerEndedError):
    """A rank this one depends on has ended."""


class OutOfStepError(CommError):
    """Two ranks run different operations where they must run the same."""


class CommTimeoutError(CommError):
    """Nothing came for as long as the limit allows."""


class Signature(NamedTuple):
    """What every participant of one operation must agree on."""

    operation: int
    dtype: int
    nbytes: int
    root: int

    def __str__(self) -> str:
        root = f", root {self.root}" if self.root >= 0 else ""
        return f"{OPERATIONS[self.operation]} ({self.nbytes} bytes{root})"


Key = tuple[int, int, int, int]  # source rank, group, phase, number


class Store(Protocol):
    """The part of Paddle's TCPStore used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Batch:
    """Receives that one step of an operation waits for together."""

    __slots__ = ("remaining",)

    def __init__(self) -> None:
        self.remaining = 0


class Receive:
    """One posted receive; ``spare`` holds the payload if it could not go to ``view`` at once."""

    __slots__ = ("batch", "done", "key", "signature", "spare", "spare_signature", "view")

    def __init__(self, key: Key, signature: Signature, view: memoryview, batch: Batch) -> None:
        self.key, self.signature, self.view, self.batch = key, signature, view, batch
        self.spare: np.ndarray | None = None
        self.spare_signature: Signature | None = None
        self.done = False
        batch.remaining += 1

    def accepts(self, signature: Signature, nbytes: int) -> bool:
        return self.signature == signature and self.view.nbytes == nbytes


class BufferPool:
    """Reused byte buffers: a fresh 64 MB array costs more in page faults than in copying."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """A uint8 array of ``nbytes``, contents undefined."""
        with self._lock:
            fits = [i for i, buffer in enumerate(self._free) if nbytes <= buffer.nbytes <= 2 * nbytes + 4096]
            if fits:
                base = self._free.pop(min(fits, key=lambda i: self._free[i].nbytes))
                self._held -= base.nbytes
                return base[:nbytes]
        return np.empty(nbytes, np.uint8)

    def give(self, buffer: np.ndarray) -> None:
        """Hand a buffer from :meth:`take` back."""
        base = buffer if buffer.base is None else buffer.base
        with self._lock:
            if isinstance(base, np.ndarray) and base.nbytes and self._held + base.nbytes <= self._limit:
                self._free.append(base)
                self._held += base.nbytes


Steps = Generator["list[Receive]", None, None]


class Operation:
    """A communication under way: a generator that yields the receives it needs next.

    It is written as a generator so that whoever waits for one operation advances all the others too:
    two ranks may then wait for two asynchronous operations in different orders.
    """

    def __init__(self, mesh: Mesh, steps: Steps, text: str, group: int, number: int, sig: Signature) -> None:
        self.mesh, self.text, self.group, self.number, self.signature = mesh, text, group, number, sig
        self._steps = steps
        self._receives: list[Receive] = []
        self.done = False
        self.failure: BaseException | None = None

    def ready(self) -> bool:
        return all(receive.done for receive in self._receives)

    def missing(self) -> list[int]:
        """Ranks a message is still to come from."""
        return sorted({receive.key[0] for receive in self._receives if not receive.done})

    def advance(self) -> None:
        """Run until the next receives are not there yet."""
        while not self.done and self.ready():
            for receive in self._receives:
                self.mesh.settle(receive, self.text)
            try:
                self._receives = next(self._steps)
            except StopIteration:
                self.done, self._receives = True, []

    def withdraw(self, failure: BaseException) -> None:
        """Forget the posted receives of an operation that failed."""
        self.failure = failure
        self.mesh.unpost(self._receives)
        self._steps.close()

    def wait(self, timeout: float | None = None) -> bool:
        self.mesh.complete(self)
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_sync(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.mesh.complete(self)


class Peer:
    """The connection to one rank."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.sending = threading.Lock()
        self.control: deque[bytes] = deque()
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

    def send(self, header: bytes, payload: memoryview | None = None) -> None:
        """Send one frame; blocks only while the peer's reader thread is busy."""
        with self.sending:
            self._write(header, payload)
        self._flush_control()

    def send_control(self, frame: bytes) -> None:
        """Send a small frame from a reader thread, which must never wait for a sender of its own side."""
        self.control.append(frame)
        self._flush_control()

    def _flush_control(self) -> None:
        while self.control and self.sending.acquire(blocking=False):
            try:
                while self.control:
                    self._write(self.control.popleft(), None)
            finally:
                self.sending.release()

    def _write(self, header: bytes, payload: memoryview | None) -> None:
        parts = [memoryview(header)] if payload is None else [memoryview(header), payload]
        while parts:
            sent = self.connection.sendmsg(parts)
            self.wire_bytes += sent
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if parts and sent:
                parts[0] = parts[0][sent:]


class Mesh:
    """The connections of this rank to all others, what has arrived, and the operations under way."""

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.peers: dict[int, Peer] = {}
        self.pool = BufferPool(_POOL_BYTES)
        self.state = threading.Condition(threading.Lock())
        self.engine = threading.RLock()
        self.pending: list[Operation] = []
        self._posted: dict[Key, Receive] = {}
        self._arrived: dict[Key, tuple[Signature, np.ndarray]] = {}
        self._ended: dict[int, str] = {}  # rank -> how
        self._broken: int | None = None  # the first rank that ended without saying goodbye
        self._issued: dict[int, dict[int, Signature]] = {}  # group -> number -> what this rank ran
        self._answers: dict[int, tuple[Signature | None, bool, str]] = {}
        self._blocked: Operation | None = None
        self._closed = False

    # -- making the connections ---------------------------------------------------------------

    @classmethod
    def connect(cls, store: Store, rank: int, world_size: int, *, address: str, timeout: float) -> Mesh:
        """Connect this rank with all others of the job.

        Args:
            store: the job's key-value store; carries the addresses and the token.
            address: local address to listen on, reachable from the other ranks.
            timeout: limit in seconds of every later wait, 0 for none.

        Raises:
            CommError: an address cannot be used, or a rank does not answer or does not know the token.
        """
        mesh = cls(rank, world_size, timeout)
        prefix = "ppfleetx/cpu_backend/"
        if rank == 0:
            store.set(prefix + "token", secrets.token_hex(32))
        try:
            listener = socket.create_server((address, 0), backlog=world_size + 16)
        except OSError as error:
            raise CommError(
                f"rank {rank}: cannot listen on {address} ({error}); "
                "GLOO_SOCKET_IFNAME selects another interface"
            ) from error
        with listener:
            store.set(f"{prefix}address/{rank}", f"{address} {listener.getsockname()[1]}")
            token = bytes.fromhex(_text(store.get(prefix + "token")))
            acceptor = threading.Thread(target=mesh._accept, args=(listener, token), daemon=True)
            acceptor.start()
            for other in range(rank):
                host, port = _text(store.get(f"{prefix}address/{other}")).split()
                mesh._add(_dial(rank, other, host, int(port), token))
            acceptor.join(START_SECONDS + HANDSHAKE_SECONDS)
        missing = sorted(set(range(world_size)) - {rank} - set(mesh.peers))
        if missing:
            raise CommError(f"rank {rank}: ranks {missing} did not connect within {START_SECONDS:.0f} s")
        mesh._start()
        return mesh

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        """Take one connection from each higher rank; a stranger is turned away and forgotten."""
        expected = set(range(self.rank + 1, self.world_size))
        deadline = time.monotonic() + START_SECONDS
        listener.settimeout(0.02)
        while not expected <= set(self.peers) and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                # In a thread of its own, so that one who connects and stays silent delays nobody.
                threading.Thread(target=self._greet, args=(connection, token), daemon=True).start()
            with self.state:
                self.state.wait_for(lambda: expected <= set(self.peers), 0.001)

    def _greet(self, connection: socket.socket, token: bytes) -> None:
        try:
            peer = _welcome(self.rank, connection, token)
        except (OSError, EOFError, CommError):
            connection.close()
            return
        if not self.rank < peer.rank < self.world_size or not self._add(peer):
            connection.close()

    def _add(self, peer: Peer) -> bool:
        with self.state:
            if peer.rank in self.peers:
                return False
            self.peers[peer.rank] = peer
            self.state.notify_all()
            return True

    def _start(self) -> None:
        for peer in self.peers.values():
            _tune(peer.connection, self.timeout)
            threading.Thread(
                target=self._read, args=(peer,), name=f"cpu-comm-{peer.rank}", daemon=True
            ).start()
        os.register_at_fork(after_in_child=self._abandon)
        atexit.register(self.close)

    def _abandon(self) -> None:
        """In a forked child (a data loader's worker): drop the sockets, or a dead parent looks alive."""
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                os.close(peer.connection.detach())
        self.peers, self._closed = {}, True

    def close(self) -> None:
        """Say goodbye: the others learn that this rank ended, and whether it failed."""
        if self._closed:
            return
        self._closed = True
        failure = getattr(sys, "last_value", None)
        text = f"it failed with {type(failure).__name__}: {failure}"[:2000] if failure is not None else ""
        payload = text.encode()
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.connection.settimeout(1.0)
                peer.send(_header(_BYE, length=len(payload)), memoryview(payload))
                peer.connection.shutdown(socket.SHUT_WR)

    # -- sending ------------------------------------------------------------------------------

    def send(
        self, dst: int, group: int, phase: int, number: int, signature: Signature, view: memoryview
    ) -> Callable[[], None] | None:
        """Send ``view``; returns what to call before its memory may change, or None if it may already.

        Raises:
            PeerLostError: the connection is gone.
        """
        peer = self.peers.get(dst)
        if peer is None:
            raise CommError(f"rank {self.rank}: the connections of this process are closed")
        try:
            peer.frames_sent += 1
            if not peer.direct or view.nbytes < DIRECT_BYTES:
                peer.send(_header(_DATA, signature, phase, group, number, view.nbytes), view)
                return None
            peer.direct_sent += 1
            ticket = peer.direct_sent
            address = _address(view)
            peer.send(_header(_DIRECT, signature, phase, group, number, view.nbytes, address))
        except OSError as error:
            self._lose(peer, _reason(error))
            raise self._lost(f"{signature} to rank {dst}", dst) from error
        return lambda: self._await_read(peer, ticket, signature, view)

    def _await_read(self, peer: Peer, ticket: int, signature: Signature, view: memoryview) -> None:
        """Until the peer has read ``view``; its reader thread does so without its program's help."""
        deadline = time.monotonic() + self.timeout if self.timeout else float("inf")
        with self.state:
            while peer.direct_acknowledged < ticket:
                if peer.rank in self._ended:
                    raise self._lost(f"{signature} to rank {peer.rank}", peer.rank)
                if time.monotonic() > deadline:
                    raise CommTimeoutError(
                        f"rank {self.rank}: rank {peer.rank} did not take {signature} "
                        f"within {self.timeout:g} s"
                    )
                self.state.wait(STALL_SECONDS)

    # -- receiving ----------------------------------------------------------------------------

    def post(self, wanted: Iterable[tuple[Key, Signature, memoryview]]) -> list[Receive]:
        """Post receives that are waited for together."""
        batch = Batch()
        receives = [Receive(key, signature, view, batch) for key, signature, view in wanted]
        with self.state:
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
        with self.state:
            for receive in receives:
                if self._posted.get(receive.key) is receive:
                    del self._posted[receive.key]

    def settle(self, receive: Receive, text: str) -> None:
        """Move a payload that came before its receive, and check that it is the right one."""
        if receive.spare is None:
            return
        buffer, receive.spare = receive.spare, None
        if receive.spare_signature != receive.signature or buffer.nbytes != receive.view.nbytes:
            raise OutOfStepError(self._mismatch(receive.key[0], text, receive.spare_signature))
        if buffer.nbytes:
            np.frombuffer(receive.view, np.uint8)[:] = buffer
        self.pool.give(buffer)

    def _mismatch(self, rank: int, text: str, other: Signature | None) -> str:
        return (
            f"rank {self.rank}: waiting for rank {rank} in {text}: it sent {other} in its place; "
            "the ranks do not run the same operations in the same order"
        )

    def _read(self, peer: Peer) -> None:
        header = bytearray(_HEADER.size)
        try:
            while True:
                peer.receive(memoryview(header))
                fields = _HEADER.unpack(header)
                if fields[0] in (_DATA, _DIRECT):
                    self._take(peer, fields)
                elif self._take_control(peer, fields):
                    return
        except (OSError, EOFError, MemoryError) as error:
            self._lose(peer, _reason(error))

    def _take(self, peer: Peer, fields: tuple[int, ...]) -> None:
        kind, operation, dtype, phase, root, group, number, nbytes, length, address = fields
        key, signature = (peer.rank, group, phase, number), Signature(operation, dtype, nbytes, root)
        with self.state:
            receive = self._posted.get(key)
            if receive is not None:
                del self._posted[key]
        direct = receive is not None and receive.accepts(signature, length)
        buffer = None if direct else self.pool.take(length)
        view = receive.view if buffer is None else memoryview(buffer)
        if kind == _DIRECT:
            _read_memory(peer.pid, address, view)
            peer.send_control(_header(_ACK))
        else:
            peer.receive(view)
        with self.state:
            peer.frames_received += 1
            receive = receive or self._posted.pop(key, None)
            if receive is None:
                self._arrived[key] = (signature, buffer)
                return
            receive.spare, receive.spare_signature, receive.done = buffer, signature, True
            receive.batch.remaining -= 1
            if receive.batch.remaining == 0 or not direct:
                self.state.notify_all()

    def _take_control(self, peer: Peer, fields: tuple[int, ...]) -> bool:
        """Handle a frame that is not data; True when it was the last one."""
        kind, operation, dtype, phase, root, group, number, nbytes, length, extra = fields
        signature = Signature(operation, dtype, nbytes, root)
        text = bytearray(length)
        peer.receive(memoryview(text))
        if kind == _QUERY:
            self._answer(peer, group, number, phase)
            return False
        with self.state:
            if kind == _ACK:
                peer.direct_acknowledged += 1
            elif kind == _STATE:
                # Nothing is on its way when each side has received what the other one sent.
                quiet = (number, extra) == (peer.frames_received, peer.frames_sent)
                differs = signature if phase & 1 else None
                self._answers[peer.rank] = (differs, bool(phase & 2) and quiet, text.decode())
            self.state.notify_all()
        if kind == _BYE:
            self._lose(peer, text.decode() or "it has ended", goodbye=True)
        return kind == _BYE

    def _lose(self, peer: Peer, reason: str, *, goodbye: bool = False) -> None:
        with self.state:
            if peer.rank not in self._ended:
                self._ended[peer.rank] = reason
                failed = not goodbye or reason != "it has ended"
                if failed and self._broken is None:
                    self._broken = peer.rank
            self.state.notify_all()

    def _lost(self, text: str, rank: int) -> PeerLostError:
        # The first rank that broke is the cause; the one waited for may only have followed it.
        cause = rank if self._broken is None else self._broken
        waiting = "" if cause == rank else f" (waiting for rank {rank})"
        return PeerLostError(
            f"rank {self.rank}: in {text}{waiting}: rank {cause} is gone: {self._ended[cause]}"
        )

    # -- running operations -------------------------------------------------------------------

    def launch(self, operation: Operation, *, sync: bool) -> Operation:
        """Start an operation, and complete it if ``sync``."""
        with self.engine:
            if operation.number >= 0:
                self._remember(operation)
            self.pending.append(operation)
            try:
                operation.advance()
            except BaseException as error:
                self._drop(operation, error)
                raise
            if operation.done:
                self.pending.remove(operation)
        if sync:
            self.complete(operation)
        return operation

    def _remember(self, operation: Operation) -> None:
        with self.state:
            issued = self._issued.setdefault(operation.group, {})
            issued[operation.number] = operation.signature
            issued.pop(operation.number - 256, None)

    def complete(self, operation: Operation) -> None:
        """Wait for ``operation``, advancing every other one under way meanwhile.

        Raises:
            PeerLostError, OutOfStepError, CommTimeoutError: it cannot complete; the message names the
                rank that is missing and the operations.
        """
        with self.engine:
            deadline = time.monotonic() + self.timeout if self.timeout else float("inf")
            while not operation.done:
                if operation.failure is not None:
                    raise operation.failure
                self._advance_ready()
                if not operation.done:
                    try:
                        self._wait(operation, deadline)
                    except BaseException as error:
                        self._drop(operation, error)
                        raise

    def _advance_ready(self) -> None:
        for operation in [*self.pending]:
            if operation.ready():
                try:
                    operation.advance()
                except BaseException as error:
                    self._drop(operation, error)
                    raise
                if operation.done:
                    self.pending.remove(operation)

    def complete_all(self) -> None:
        """Wait for everything under way."""
        while self.pending:
            self.complete(self.pending[0])

    def _drop(self, operation: Operation, error: BaseException) -> None:
        if operation in self.pending:
            self.pending.remove(operation)
        operation.withdraw(error)

    def _wait(self, operation: Operation, deadline: float) -> None:
        """Until some pending operation can advance."""
        suspicion = 0
        with self.state:
            self._blocked = operation
            self._answers.clear()
        try:
            while True:
                with self.state:
                    if self.state.wait_for(
                        self._woken, min(STALL_SECONDS, max(deadline - time.monotonic(), 0))
                    ):
                        if any(other.ready() for other in self.pending):
                            return
                        self._check_lost(operation)
                    if time.monotonic() >= deadline:
                        raise CommTimeoutError(self._timed_out(operation))
                    suspicion = self._judge(operation, suspicion)
                self._query(operation)
                self._sleep_unless_ready()
        finally:
            with self.state:
                self._blocked = None

    def _woken(self) -> bool:
        if any(other.ready() for other in self.pending):
            return True
        return self._broken is not None or any(rank in self._ended for rank in self._blocked.missing())

    def _sleep_unless_ready(self) -> None:
        """Let the answers come in; a failure found meanwhile is judged by the caller."""
        with self.state:
            self.state.wait_for(lambda: any(other.ready() for other in self.pending), 0.05)

    def _check_lost(self, operation: Operation) -> None:
        missing = operation.missing()
        gone = [rank for rank in missing if rank in self._ended]
        if gone or self._broken is not None:
            raise self._lost(operation.text, gone[0] if gone else missing[0])

    def _judge(self, operation: Operation, suspicion: int) -> int:
        """Read the answers of the ranks waited for: another operation, or waiting for us as we for them?"""
        waiting = False
        for rank in operation.missing():
            differs, waits_for_us, text = self._answers.get(rank, (None, False, ""))
            if differs is not None:
                raise OutOfStepError(self._mismatch(rank, operation.text, differs))
            if waits_for_us and len(self.pending) == 1:
                waiting = True
                # Twice, so that an answer that crossed a message on its way is not believed.
                if suspicion >= 2:
                    raise OutOfStepError(
                        f"rank {self.rank}: waiting for rank {rank} in {operation.text}, while rank {rank} "
                        f"waits for this rank in {text}; the ranks do not run the same operations "
                        "in the same order"
                    )
        return suspicion + 1 if waiting else 0

    def _query(self, operation: Operation) -> None:
        """Ask the ranks waited for what they are doing."""
        with self.state:
            self._answers.clear()
            missing = [rank for rank in operation.missing() if rank not in self._ended]
        point_to_point = int(operation.number < 0)
        for rank in missing:
            with contextlib.suppress(OSError):
                self.peers[rank].send(
                    _header(
                        _QUERY, operation.signature, point_to_point, operation.group, max(operation.number, 0)
                    )
                )

    def _answer(self, peer: Peer, group: int, number: int, point_to_point: int) -> None:
        with self.state:
            issued = None if point_to_point else self._issued.get(group, {}).get(number)
            blocked = self._blocked
            text = "no communication (computing, or reading data)" if blocked is None else blocked.text
            waits = blocked is not None and len(self.pending) == 1 and peer.rank in blocked.missing()
            flags = (1 if issued is not None else 0) | (2 if waits else 0)
            payload = text.encode()
            frame = _header(
                _STATE, issued, flags, group, peer.frames_sent, len(payload), peer.frames_received
            )
        peer.send_control(frame + payload)

    def _timed_out(self, operation: Operation) -> str:
        missing = operation.missing()
        known = [f"rank {r} was in {self._answers[r][2]}" for r in missing if r in self._answers]
        return (
            f"rank {self.rank}: waited {self.timeout:g} s for rank{'s' * (len(missing) > 1)} "
            f"{', '.join(map(str, missing))} in {operation.text}"
            + (f" ({'; '.join(known)})" if known else "")
            + f"; {TIMEOUT_VARIABLE} sets the limit"
        )


# -- the handshake ----------------------------------------------------------------------------


def local_address() -> str:
    """The address other ranks reach this one at.

    ``GLOO_SOCKET_IFNAME``'s, else the host of ``PADDLE_CURRENT_ENDPOINT``, as Paddle's own Gloo takes
    its interface from the first and the launcher announces the second.

    Raises:
        CommError: the interface has no address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interface:
        return os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0] or "127.0.0.1"
    get_interface_address = 0x8915  # SIOCGIFADDR, linux/sockios.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), get_interface_address, request)[20:24])
        except OSError as error:
            raise CommError(f"GLOO_SOCKET_IFNAME={interface}: no IPv4 address ({error})") from error


def time_limit() -> float:
    """Seconds any wait may take (``PADDLE_CPU_COMM_TIMEOUT``, default 1800, 0 for ever)."""
    text = os.environ.get(TIMEOUT_VARIABLE, "1800")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise CommError(f"{TIMEOUT_VARIABLE}={text}: not a number of seconds (0: no limit)")
    return seconds


def _proof(token: bytes, side: str, *parts: bytes) -> bytes:
    return hmac.digest(token, b"|".join([side.encode(), *(part.hex().encode() for part in parts)]), "sha256")


def _dial(rank: int, other: int, host: str, port: int, token: bytes) -> Peer:
    """Connect to ``other`` and prove to each other that both know the job's token.

    HMAC-SHA256 over both sides' random challenges and ranks; the token itself is not sent.
    """
    try:
        connection = socket.create_connection((host, port), HANDSHAKE_SECONDS)
        connection.settimeout(HANDSHAKE_SECONDS)
        peer = Peer(other, connection)
        theirs, ours, ranks = (
            _receive_bytes(peer, 32),
            secrets.token_bytes(32),
            struct.pack("!II", rank, other),
        )
        connection.sendall(ranks + ours + _proof(token, "dial", theirs, ours, ranks))
        if not hmac.compare_digest(_receive_bytes(peer, 32), _proof(token, "welcome", ours, theirs, ranks)):
            raise CommError(f"{host}:{port} does not know this job's token")
        _probe_memory(peer)
    except (OSError, EOFError) as error:
        raise CommError(f"rank {rank}: no connection to rank {other} at {host}:{port}: {error}") from error
    return peer


def _welcome(rank: int, connection: socket.socket, token: bytes) -> Peer:
    connection.settimeout(HANDSHAKE_SECONDS)
    peer = Peer(-1, connection)
    ours = secrets.token_bytes(32)
    connection.sendall(ours)
    ranks, theirs, proof = (_receive_bytes(peer, n) for n in (8, 32, 32))
    peer.rank, addressed = struct.unpack("!II", ranks)
    if addressed != rank or not hmac.compare_digest(proof, _proof(token, "dial", ours, theirs, ranks)):
        raise CommError("a stranger")
    connection.sendall(_proof(token, "welcome", theirs, ours, ranks))
    _probe_memory(peer)
    return peer


def _probe_memory(peer: Peer) -> None:
    """Find out whether each side may read the other's memory: same host, same user, kernel willing."""
    secret = np.frombuffer(secrets.token_bytes(32), np.uint8).copy()
    wanted = os.environ.get(DIRECT_VARIABLE, "1") != "0"
    pid = os.getpid() if wanted else 0
    peer.connection.sendall(struct.pack("!IQ", pid, secret.ctypes.data) + secret.tobytes())
    peer_pid, address = struct.unpack("!IQ", _receive_bytes(peer, 12))
    expected, found = _receive_bytes(peer, 32), bytearray(32)
    readable = False
    if wanted and peer_pid:
        with contextlib.suppress(OSError):
            _read_memory(peer_pid, address, memoryview(found))
            readable = bytes(found) == expected
    peer.connection.sendall(b"1" if readable else b"0")
    peer.pid = peer_pid
    peer.direct = _receive_bytes(peer, 1) == b"1"  # also keeps `secret` alive until the peer has read it


def _receive_bytes(peer: Peer, count: int) -> bytes:
    buffer = bytearray(count)
    peer.receive(memoryview(buffer))
    return bytes(buffer)


def _tune(connection: socket.socket, timeout: float) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    # A host that vanishes sends no goodbye: ask it after 20 silent seconds, give up after 30 more.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if timeout:
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


# -- small things -----------------------------------------------------------------------------


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)


def _read_memory(pid: int, address: int, view: memoryview) -> None:
    """Copy ``view.nbytes`` bytes at ``address`` of process ``pid`` to ``view`` (process_vm_readv(2))."""
    target, done = _address(view), 0
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


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def _header(
    kind: int,
    signature: Signature | None = None,
    phase: int = 0,
    group: int = 0,
    number: int = 0,
    length: int = 0,
    address: int = 0,
) -> bytes:
    operation, dtype, nbytes, root = signature or (0, 0, 0, -1)
    return _HEADER.pack(kind, operation, dtype, phase, root, group, number, nbytes, length, address)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
