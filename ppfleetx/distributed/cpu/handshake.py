"""Connect the ranks of a CPU job; both ends of each connection show that they belong to the job.

Each pair of ranks has one connection for its messages. Ranks on different hosts have a second connection that
shows when the other host is gone (``watch.py``). Strangers are turned away and delay nobody.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time

import numpy as np

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.cpu.wire import CommError, Peer, StartError, read_memory
from ppfleetx.distributed.rendezvous import (
    Address,
    Member,
    Members,
    RendezvousError,
    meeting_point,
    receive,
    visit,
)
from ppfleetx.utils.machine import interface_address
from ppfleetx.utils.peers import START_VARIABLE, start_timeout

DIRECT_VARIABLE = "PADDLE_CPU_COMM_DIRECT"
HANDSHAKE_SECONDS = 30.0
MESSAGES, WATCH = range(2)  # the roles of connections


def connect_ranks(rank: int, world_size: int, address: str) -> dict[int, Peer]:
    """Meet all other ranks of the job and connect to each.

    Raises:
        ConfigError: this process cannot listen on the address.
        StartError: a rank does not arrive, does not answer or does not know the token.
    """
    try:
        listener = socket.create_server((address, 0), backlog=2 * world_size + 16)
    except OSError as error:
        raise ConfigError(
            f"rank {rank} cannot listen there ({error.strerror}): it is not an address of this machine. "
            "--host of the launcher sets the address, GLOO_SOCKET_IFNAME selects an interface",
            key="address",
            value=address,
        ) from error
    with listener:
        members = meet(rank, world_size, (address, listener.getsockname()[1]))
        connections = _Connections(rank, members)
        listener.settimeout(0.02)
        acceptor = threading.Thread(target=connections.accept, args=(listener,), daemon=True)
        acceptor.start()
        for other in range(rank):
            for role in connections.roles(other):
                connections.add(_dial(rank, other, members, role), role)
        acceptor.join(HANDSHAKE_SECONDS + 1.0)
    return connections.peers()


def meet(rank: int, world_size: int, own: Address) -> Members:
    """Learn the job's token and the addresses on which all ranks listen; ``own`` is this rank's.

    Raises:
        ConfigError: the environment does not say where the ranks meet.
        StartError: a rank did not arrive in time or has ended, or the ranks cannot meet there.
    """
    point, seconds = meeting_point(), start_timeout()
    member = Member("rank {} at {}:{}".format(rank, *own), rank, own)
    try:
        members = (visit if rank else receive)(point, world_size, member, seconds)
    except RendezvousError as error:
        limit = f"{START_VARIABLE} sets the limit of the wait"
        raise StartError(f"rank {rank}: {error}; {error.fix}. {limit}") from error
    members.close()
    return members


class _Connections:
    def __init__(self, rank: int, members: Members) -> None:
        self._rank, self._members = rank, members
        self._state = threading.Condition(threading.Lock())
        self._connected: dict[tuple[int, int], Peer] = {}  # (rank, role) -> connection

    def roles(self, other: int) -> tuple[int, ...]:
        """The roles of the connections to ``other``. Ranks on one host need no watch."""
        addresses = self._members.addresses
        return (MESSAGES,) if addresses[other][0] == addresses[self._rank][0] else (MESSAGES, WATCH)

    def accept(self, listener: socket.socket) -> None:
        """Accept the connections of the higher ranks, and turn strangers away."""
        higher = range(self._rank + 1, len(self._members.addresses))
        expected = {(other, role) for other in higher for role in self.roles(other)}
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        while not expected <= set(self._connected) and time.monotonic() < deadline:
            try:
                connection, _ = listener.accept()
                # This runs in a separate thread, so that a silent stranger delays nobody.
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
            except TimeoutError:
                pass
            except OSError:
                return  # this rank has given up and closed the listener
            with self._state:
                self._state.wait_for(lambda: expected <= set(self._connected), 0.001)

    def _greet(self, connection: socket.socket) -> None:
        try:
            peer, role = _welcome(self._rank, connection, self._members.token)
        except (OSError, EOFError, CommError):
            connection.close()
            return
        known = self._rank < peer.rank < len(self._members.addresses) and role in self.roles(peer.rank)
        if not known or not self.add(peer, role):
            connection.close()

    def add(self, peer: Peer, role: int) -> bool:
        with self._state:
            if (peer.rank, role) in self._connected:
                return False
            self._connected[peer.rank, role] = peer
            self._state.notify_all()
            return True

    def peers(self) -> dict[int, Peer]:
        """The other ranks with their connections.

        Raises:
            StartError: a rank did not connect.
        """
        peers: dict[int, Peer] = {}
        for other in range(len(self._members.addresses)):
            if other == self._rank:
                continue
            connections = [self._connected.get((other, role)) for role in self.roles(other)]
            if None in connections:
                raise StartError(
                    f"rank {self._rank}: {self._members.names[other]} did not connect within "
                    f"{HANDSHAKE_SECONDS:g} s"
                )
            peers[other] = peer = connections[MESSAGES]
            peer.name = self._members.names[other]
            peer.watch = connections[WATCH].connection if len(connections) > 1 else None
        return peers


def local_address() -> str:
    """The address at which the other ranks can reach this one.

    It is the address of the interface ``GLOO_SOCKET_IFNAME``, as in Paddle's Gloo, or else the host in
    ``PADDLE_CURRENT_ENDPOINT``, which the launcher sets.

    Raises:
        ConfigError: the interface has no address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interface:
        return os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0] or "127.0.0.1"
    try:
        return interface_address(interface)
    except OSError as error:
        raise ConfigError(
            f"this interface has no IPv4 address ({error.strerror})",
            key="GLOO_SOCKET_IFNAME",
            value=interface,
            place="environment",
        ) from error


def _dial(rank: int, other: int, members: Members, role: int) -> Peer:
    """Connect to ``other``; both ends send the job's token, which the ranks have learnt when they met."""
    try:
        connection = socket.create_connection(members.addresses[other], HANDSHAKE_SECONDS)
        connection.settimeout(HANDSHAKE_SECONDS)
        peer = Peer(other, connection)
        connection.sendall(members.token + struct.pack("!III", rank, other, role))
        if not hmac.compare_digest(_receive_bytes(peer, len(members.token)), members.token):
            raise StartError(f"rank {rank}: {members.names[other]} does not know this job's token")
        if role == MESSAGES:
            _probe_memory(peer)
    except (OSError, EOFError) as error:
        raise StartError(f"rank {rank}: no connection to {members.names[other]}: {error}") from error
    return peer


def _welcome(rank: int, connection: socket.socket, token: bytes) -> tuple[Peer, int]:
    """Answer the :func:`_dial` of another rank. Returns the peer and the role of the connection."""
    connection.settimeout(HANDSHAKE_SECONDS)
    peer = Peer(-1, connection)
    is_known = hmac.compare_digest(_receive_bytes(peer, len(token)), token)
    peer.rank, addressed, role = struct.unpack("!III", _receive_bytes(peer, 12))
    if addressed != rank or not is_known:
        raise CommError("a stranger")
    connection.sendall(token)
    if role == MESSAGES:
        _probe_memory(peer)
    return peer, role


def _probe_memory(peer: Peer) -> None:
    """Find out whether each side can read the other's memory: on the same host, as the same user, if the
    kernel allows it.
    """
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
