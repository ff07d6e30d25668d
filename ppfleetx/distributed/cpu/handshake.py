"""Open the connections between the ranks of a CPU job. Both ends of a connection prove with a secret token
that they belong to the job."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Collection

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.cpu.wire import CommError, Peer, StartError
from ppfleetx.distributed.rendezvous import (
    Address,
    Member,
    Members,
    RendezvousError,
    meeting_point,
    receive,
    visit,
)
from ppfleetx.utils.lost_peers import START_VARIABLE, start_timeout
from ppfleetx.utils.machine import interface_address

# A rank sends as soon as it is connected. A foreign program that connects and sends nothing must not delay
# the ranks.
HANDSHAKE_SECONDS, _STRANGER_SECONDS = 30.0, 3.0
MESSAGES, WATCH = range(2)  # the roles of connections


def connect_ranks(rank: int, world_size: int, address: str) -> dict[int, Peer]:
    """Connect this rank to every other rank of the job, and return the connections by rank. ``address`` is
    this machine's IP address, at which the others can connect.

    Raises:
        ConfigError: this process cannot listen on ``address``, or the environment does not say where the
            ranks meet, or sets a time limit that is not valid.
        StartError: a rank does not arrive in time, does not answer, or has the wrong token.
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
        # Ranks on the same host need no keepalive connection.
        hosts = [host for host, _ in members.addresses]
        roles = [(MESSAGES,) if host == hosts[rank] else (MESSAGES, WATCH) for host in hosts]
        connected: dict[tuple[int, int], Peer] = {}  # (rank, role) -> connection
        expected = {(other, role) for other in range(rank + 1, world_size) for role in roles[other]}
        listener.settimeout(0.02)
        acceptor = threading.Thread(
            target=_accept, args=(rank, listener, members.token, expected, connected), daemon=True
        )
        acceptor.start()
        for other in range(rank):
            for role in roles[other]:
                connected[other, role] = _connect_to(rank, other, members, role)
        acceptor.join(HANDSHAKE_SECONDS + 1.0)
    peers: dict[int, Peer] = {}
    for other in (*range(rank), *range(rank + 1, world_size)):
        if any((other, role) not in connected for role in roles[other]):
            said = f"{members.names[other]} did not connect within {HANDSHAKE_SECONDS:g} s"
            raise StartError(f"rank {rank}: {said}")
        peers[other] = peer = connected[other, MESSAGES]
        peer.name = members.names[other]
        peer.watch = connected[other, WATCH].connection if WATCH in roles[other] else None
    return peers


def meet(rank: int, world_size: int, own: Address) -> Members:
    """Take part in the job's rendezvous. ``own`` is the address on which this rank listens. Returns the
    addresses of all ranks, and a secret token that they share.

    Raises:
        ConfigError: the environment does not say where the ranks meet, or sets a time limit that is not
            valid.
        StartError: the rendezvous fails, or a rank does not arrive in time.
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


def _accept(
    rank: int,
    listener: socket.socket,
    token: bytes,
    expected: Collection[tuple[int, int]],
    connected: dict[tuple[int, int], Peer],
) -> None:
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    while not connected.keys() >= set(expected) and time.monotonic() < deadline:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            return  # this rank has given up and closed the listener
        try:
            peer, role = _welcome(rank, connection, token)
        except (OSError, EOFError, CommError):
            connection.close()
            continue
        if (peer.rank, role) in expected and (peer.rank, role) not in connected:
            connected[peer.rank, role] = peer
        else:
            connection.close()


def local_address() -> str:
    """Return this rank's IP address: the address of the network interface ``GLOO_SOCKET_IFNAME`` if it is
    set, else the host in ``PADDLE_CURRENT_ENDPOINT``. Raises ConfigError if the interface has no address."""
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


def _connect_to(rank: int, other: int, members: Members, role: int) -> Peer:
    """Connect to rank ``other``, which listens, and check its identity: each side sends the secret token that
    all ranks got in the rendezvous."""
    try:
        connection = socket.create_connection(members.addresses[other], HANDSHAKE_SECONDS)
        connection.settimeout(HANDSHAKE_SECONDS)
        peer = Peer(other, connection)
        connection.sendall(members.token + struct.pack("!III", rank, other, role))
        if not hmac.compare_digest(_receive_bytes(peer, len(members.token)), members.token):
            raise StartError(f"rank {rank}: {members.names[other]} does not know this job's token")
    except (OSError, EOFError) as error:
        raise StartError(f"rank {rank}: no connection to {members.names[other]}: {error}") from error
    return peer


def _welcome(rank: int, connection: socket.socket, token: bytes) -> tuple[Peer, int]:
    connection.settimeout(_STRANGER_SECONDS)
    peer = Peer(-1, connection)
    is_known = hmac.compare_digest(_receive_bytes(peer, len(token)), token)
    peer.rank, addressed, role = struct.unpack("!III", _receive_bytes(peer, 12))
    if addressed != rank or not is_known:
        raise CommError("the connection does not belong to this job")
    connection.sendall(token)
    return peer, role


def _receive_bytes(peer: Peer, count: int) -> bytes:
    buffer = bytearray(count)
    peer.receive(memoryview(buffer))
    return bytes(buffer)
