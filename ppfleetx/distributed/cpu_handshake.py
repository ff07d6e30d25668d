"""How the ranks of a CPU job find each other: one authenticated TCP connection for each pair of them.

Rank 0 puts a random token into the job's store. Two ranks that connect prove to each other that they know
it; a stranger is turned away, and delays nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from typing import Protocol

import numpy as np

from ppfleetx.distributed.cpu_wire import CommError, Peer, read_memory

DIRECT_VARIABLE = "PADDLE_CPU_COMM_DIRECT"
HANDSHAKE_SECONDS = 30.0
START_SECONDS = 300.0  # how far apart the ranks of a job may start
_PREFIX = "ppfleetx/cpu_backend/"


class Store(Protocol):
    """The part of Paddle's TCPStore used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def connect_ranks(store: Store, rank: int, world_size: int, address: str) -> dict[int, Peer]:
    """Connect this rank with all others of the job.

    Args:
        store: the job's key-value store; carries the addresses and the token.
        address: local address to listen on, reachable from the other ranks.

    Raises:
        CommError: an address cannot be used, or a rank does not answer or does not know the token.
    """
    meeting = _Meeting(rank, world_size)
    if rank == 0:
        store.set(f"{_PREFIX}token", secrets.token_hex(32))
    try:
        listener = socket.create_server((address, 0), backlog=world_size + 16)
    except OSError as error:
        raise CommError(
            f"rank {rank}: cannot listen on {address} ({error}); GLOO_SOCKET_IFNAME selects another interface"
        ) from error
    with listener:
        store.set(f"{_PREFIX}address/{rank}", f"{address} {listener.getsockname()[1]}")
        token = bytes.fromhex(_text(store.get(f"{_PREFIX}token")))
        acceptor = threading.Thread(target=meeting.accept, args=(listener, token), daemon=True)
        acceptor.start()
        for other in range(rank):
            host, port = _text(store.get(f"{_PREFIX}address/{other}")).split()
            meeting.add(_dial(rank, other, host, int(port), token))
        acceptor.join(START_SECONDS + HANDSHAKE_SECONDS)
    missing = sorted(set(range(world_size)) - {rank} - set(meeting.peers))
    if missing:
        raise CommError(f"rank {rank}: ranks {missing} did not connect within {START_SECONDS:.0f} s")
    return meeting.peers


class _Meeting:
    """Who has come so far."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._state = threading.Condition(threading.Lock())
        self.peers: dict[int, Peer] = {}

    def accept(self, listener: socket.socket, token: bytes) -> None:
        """Take one connection from each higher rank; a stranger is turned away and forgotten."""
        expected = set(range(self._rank + 1, self._world_size))
        deadline = time.monotonic() + START_SECONDS
        listener.settimeout(0.02)
        while not expected <= set(self.peers) and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                # In a thread of its own, so that one who connects and stays silent delays nobody.
                threading.Thread(target=self._greet, args=(connection, token), daemon=True).start()
            with self._state:
                self._state.wait_for(lambda: expected <= set(self.peers), 0.001)

    def _greet(self, connection: socket.socket, token: bytes) -> None:
        try:
            peer = _welcome(self._rank, connection, token)
        except (OSError, EOFError, CommError):
            connection.close()
            return
        if not self._rank < peer.rank < self._world_size or not self.add(peer):
            connection.close()

    def add(self, peer: Peer) -> bool:
        """Take note of a connection; False where there is one already."""
        with self._state:
            if peer.rank in self.peers:
                return False
            self.peers[peer.rank] = peer
            self._state.notify_all()
            return True


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
            read_memory(peer_pid, address, memoryview(found))
            readable = bytes(found) == expected
    peer.connection.sendall(b"1" if readable else b"0")
    peer.pid = peer_pid
    peer.direct = _receive_bytes(peer, 1) == b"1"  # also keeps `secret` alive until the peer has read it


def _receive_bytes(peer: Peer, count: int) -> bytes:
    buffer = bytearray(count)
    peer.receive(memoryview(buffer))
    return bytes(buffer)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
