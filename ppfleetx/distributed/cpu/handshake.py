"""Open the connections between the ranks of a CPU job."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.cpu.wire import Peer, StartError
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

HANDSHAKE_SECONDS = 30.0
_GREETING_SECONDS = 10.0  # a rank sends its greeting as soon as it is connected
MESSAGES, WATCH = range(2)  # the roles of connections
_GREETING = struct.Struct("!II")  # rank of the sender, role of the connection


def connect_ranks(rank: int, world_size: int, address: str) -> dict[int, Peer]:
    """Connect this rank to every other rank of the job, and return the connections by rank. ``address`` is an
    IP address of this machine that the other ranks can reach.

    Raises:
        ConfigError: this process cannot listen on ``address``, or an environment variable for the rendezvous
            or its time limit is missing or invalid.
        StartError: a rank cannot be reached, or does not connect in time.
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
        # All ranks are listening by now, so a lower rank's kernel completes the connection even before that
        # rank calls accept().
        connected = {
            (other, role): _connect_to(rank, other, members, role)
            for other in range(rank)
            for role in roles[other]
        }
        expected = {(other, role) for other in range(rank + 1, world_size) for role in roles[other]}
        connected |= _accept(rank, listener, expected, members.names)
    peers: dict[int, Peer] = {}
    for other in (*range(rank), *range(rank + 1, world_size)):
        peers[other] = Peer(other, connected[other, MESSAGES], members.names[other])
        peers[other].watch = connected.get((other, WATCH))
    return peers


def meet(rank: int, world_size: int, own: Address) -> Members:
    """Take part in the job's rendezvous, and return the names and addresses of all ranks. ``own`` is the
    address on which this rank listens.

    Raises:
        ConfigError: an environment variable for the rendezvous or its time limit is missing or invalid.
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


def _connect_to(rank: int, other: int, members: Members, role: int) -> socket.socket:
    """Connect to rank ``other``, which is already listening, and send this rank's number and the ``role`` of
    the connection. Raises StartError if the connection fails."""
    try:
        connection = socket.create_connection(members.addresses[other], HANDSHAKE_SECONDS)
        connection.sendall(_GREETING.pack(rank, role))
    except OSError as error:
        raise StartError(f"rank {rank}: no connection to {members.names[other]}: {error}") from error
    return connection


def _accept(
    rank: int, listener: socket.socket, expected: set[tuple[int, int]], names: Sequence[str]
) -> dict[tuple[int, int], socket.socket]:
    """Accept connections from other ranks, and return them by (rank at the other end, role). ``expected`` has
    these pairs. Raises StartError if a connection does not arrive in time."""
    found: dict[tuple[int, int], socket.socket] = {}
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    while missing := expected - found.keys():
        try:
            if (left := deadline - time.monotonic()) <= 0:  # other programs can keep connecting
                raise TimeoutError
            listener.settimeout(left)
            connection, _ = listener.accept()
        except TimeoutError:
            said = f"{names[min(missing)[0]]} did not connect within {HANDSHAKE_SECONDS:g} s"
            raise StartError(f"rank {rank}: {said}") from None
        greeting = _greeting(connection)
        if greeting in missing:
            found[greeting] = connection
        else:
            connection.close()  # of another program, such as a monitor that probes the port
    return found


def _greeting(connection: socket.socket) -> tuple[int, ...] | None:
    connection.settimeout(_GREETING_SECONDS)
    try:
        return _GREETING.unpack(connection.recv(_GREETING.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return None


def local_address() -> str:
    """Return this rank's IP address: that of the network interface ``GLOO_SOCKET_IFNAME``, if this variable
    is set, or else the host in ``PADDLE_CURRENT_ENDPOINT``. Raises ConfigError if the interface has no
    address."""
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
