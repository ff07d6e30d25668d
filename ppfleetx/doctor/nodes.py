"""Whether the machines of a job reach each other, examined before the launcher starts anything.

All machines run the same: the one that ``--master`` names listens there, and the others come. Then each tries
to connect to a port of every other machine, as NCCL and Gloo will.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping

from ppfleetx.distributed.rendezvous import RendezvousError
from ppfleetx.doctor.case import Case, within
from ppfleetx.doctor.interfaces import interfaces, is_local, network, route_to
from ppfleetx.doctor.links import examine_links, receiving
from ppfleetx.doctor.meeting import open_meeting
from ppfleetx.doctor.rows import Row, fail, ok, warn

_RESOLVE_SECONDS = 20.0


def examine_nodes(master: str, size: int, seconds: float, environ: Mapping[str, str]) -> Iterator[Row]:
    """The rows of this machine.

    Args:
        master: ``HOST:PORT``, as given to the launcher.
        size: machines of the job.
        seconds: to wait for the others.
        environ: ``POD_IP`` is the address that the launcher announces.
    """
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        yield fail(
            "--master", f"{master} is not HOST:PORT", "an address of the first machine, a free port of it"
        )
        return
    address = resolved(host)
    if not address:
        cure = "give the address instead of the name, or add it to /etc/hosts of this machine"
        yield fail("--master", f"the name {host} is not known on {socket.gethostname()}", cure)
        return
    own, is_first = own_address(environ), is_local(address)
    problem = address_row(own, host, address, is_first=is_first)
    yield problem or ok("own address", f"{own}, announced to the others by the launcher")
    name = f"node {socket.gethostname()} {own}"
    try:
        with receiving() as own_port:
            point = address, int(port)
            with contextlib.closing(open_meeting(point, size, name, seconds, is_host=is_first)) as meeting:
                yield ok("--master", f"all {size} machines have met at {master}: {', '.join(meeting.names)}")
                yield from examine_links(meeting, own, own_port, environ)
    except RendezvousError as error:
        yield fail("--master", f"{master}: {error}", error.cure)
        yield from network(Case(world_size=2, environ=environ))
        for one in interfaces():
            if one.address and not one.is_up:
                yield warn("interfaces", f"{one}", f"if it should lead there: ip link set {one.name} up")


def resolved(host: str, seconds: float = _RESOLVE_SECONDS) -> str:
    """The IPv4 address of a name; empty if it is not known, or no name server answers in time."""
    try:
        return within(seconds, lambda: socket.gethostbyname(host))
    except (OSError, UnicodeError):  # a label that is empty or too long
        return ""


def own_address(environ: Mapping[str, str]) -> str:
    """The address that Paddle's launcher announces for this machine: ``POD_IP``, else the host name's."""
    if named := environ.get("POD_IP"):
        return named
    try:
        name = within(_RESOLVE_SECONDS, lambda: socket.getfqdn(socket.gethostname()))
    except TimeoutError:
        name = ""
    return (resolved(name) if name else "") or "127.0.0.1"


def address_row(own: str, host: str, master: str, *, is_first: bool) -> Row | None:
    """What is wrong with the address that the launcher announces; None if nothing is.

    Args:
        own: that address.
        host: the host in ``--master``.
        master: its address.
        is_first: whether that is this machine.
    """
    better = host if is_first else route_to(master)
    cure = f"POD_IP={better} before the command on this machine" if better else "set POD_IP on this machine"
    if own.startswith("127."):
        return fail("own address", f"the host name stands for {own}, which reaches no other machine", cure)
    if not is_local(own):
        return fail("own address", f"the launcher would announce {own}, which is not this machine's", cure)
    if is_first and host != own:
        return fail(
            "own address",
            f"--master names this machine as {host}, and the launcher announces it as {own}: it would wait "
            "for another machine to listen",
            f"give --master {own}:PORT on all machines, or {cure}",
        )
    return None
