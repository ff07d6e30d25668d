"""Checks of ``ppfleetx doctor`` on the network: the machine's interfaces, and the connections between all
machines of a job."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ppfleetx.distributed.rendezvous import RendezvousError
from ppfleetx.doctor.process_connections import Answer, Guest, Host, connect_processes
from ppfleetx.doctor.results import Row, Target, fail, ok, warn, within
from ppfleetx.utils.machine import interface_address, interface_flags

_UP, _LOOPBACK = 0x1, 0x8  # linux/if.h
_NOT_NCCL = ("lo", "docker")  # prefixes of interfaces that NCCL uses only if NCCL_SOCKET_IFNAME names them


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine. ``address`` is its IPv4 address, or "" if it has none."""

    name: str
    address: str
    is_up: bool
    is_loopback: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.address or 'without an address'}{'' if self.is_up else ' (down)'}"


def interfaces() -> list[Interface]:
    found: list[Interface] = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # a container's interface may have disappeared
            flags, address = interface_flags(name), ""
            with contextlib.suppress(OSError):
                address = interface_address(name)
            found.append(Interface(name, address, bool(flags & _UP), bool(flags & _LOOPBACK)))
    return found


def network(target: Target) -> Iterator[Row]:
    found = interfaces()
    yield ok("interfaces", ", ".join(map(str, found)))
    yield from named_rows(target, found)


def named_rows(target: Target, found: Sequence[Interface]) -> Iterator[Row]:
    """Check that the interfaces named by ``NCCL_SOCKET_IFNAME`` and ``GLOO_SOCKET_IFNAME`` exist and can be
    used. A variable that is not set is not checked."""
    several = target.world_size > target.local_size
    for variable, choose in _VARIABLES:
        value = target.environ.get(variable, "")
        if value:
            yield _named_row(variable, value, choose(value, found), found, several=several)


def _named_row(
    variable: str, value: str, chosen: Sequence[Interface], found: Sequence[Interface], *, several: bool
) -> Row:
    usable = [one for one in chosen if one.is_up and one.address]
    others = ", ".join(one.name for one in found if one.is_up and one.address and not one.is_loopback)
    fix = f"set {variable} on this machine to one of: {others or 'none is up with an address'}"
    if not chosen:
        return fail(variable, f"{value}: this machine has no such interface", fix)
    if not usable:
        return fail(variable, f"{value}: {', '.join(map(str, chosen))} cannot be used", fix)
    if several and all(one.is_loopback for one in usable):
        return fail(variable, f"{value} is the loopback, which reaches no other machine", fix)
    if len(usable) > 1 and variable.startswith("GLOO"):
        return warn(variable, f"{value} names several", fix)
    return ok(variable, f"{value}: {', '.join(map(str, usable))}")


def nccl_choice(value: str, found: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that NCCL selects for a value of ``NCCL_SOCKET_IFNAME``, a comma-separated list
    of prefixes."""
    # A leading ^ excludes the named interfaces. A leading = makes the prefixes whole names.
    excludes, text = value.startswith("^"), value.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    names = [name for name in text.split(",") if name]

    def is_named(one: Interface) -> bool:
        return any(one.name == name if exact else one.name.startswith(name) for name in names)

    if excludes:
        return [one for one in found if not is_named(one) and not one.name.startswith(_NOT_NCCL)]
    return [one for one in found if is_named(one)]


def _exact(value: str, found: Sequence[Interface]) -> list[Interface]:
    return [one for one in found if one.name == value]


def is_local(address: str) -> bool:
    is_own = any(one.address == address for one in interfaces())  # even if the interface is down
    return is_own or address.startswith("127.") or route_to(address) == address


def route_to(address: str) -> str:
    """Return the address from which this machine sends packets to ``address``, or "" if there is no route. If
    ``address`` belongs to this machine, the result is ``address`` itself."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        socket.inet_aton(address)  # raises for a name, which a name server would have to resolve
        probe.connect((address, 9))  # UDP: sends nothing
        return probe.getsockname()[0]
    return ""


_VARIABLES = (("NCCL_SOCKET_IFNAME", nccl_choice), ("GLOO_SOCKET_IFNAME", _exact))


_THREADS = 32
_REACH_SECONDS, _ROUND_SECONDS = 5.0, 60.0
_OPEN_FIX = "NCCL and Gloo open ports of their own: let the machines reach each other on all ports"


def reach(address: tuple[str, int]) -> str:
    """Try to connect to a port of another machine. Returns the problem, or "" if the connection works."""
    try:
        socket.create_connection(address, _REACH_SECONDS).close()
    except TimeoutError:
        return "nothing comes back"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def examine_links(meeting: Host | Guest, own: str, port: int) -> Iterator[Row]:
    """Connect to every other machine of the job, and yield report rows on the connections of all machines.
    All machines must call this. ``own`` and ``port`` are the address and port where this machine listens."""
    announced = meeting.exchange([own, port], _ROUND_SECONDS)
    size = len(announced)
    # Each machine begins with its successor, so that not all machines connect to the same machine first.
    order = [(meeting.number + step) % size for step in range(1, size)]
    addresses = {str(n): tuple(announced[n].value) for n in order if not announced[n].problem}
    with ThreadPoolExecutor(_THREADS) as pool:
        links = dict(zip(addresses, pool.map(reach, addresses.values()), strict=True))
    yield from link_rows(meeting.names, meeting.exchange(links, 2 * _ROUND_SECONDS))


def link_rows(names: Sequence[str], answers: Sequence[Answer]) -> Iterator[Row]:
    """Yield report rows on the connections between all machines.

    Args:
        names: the names of the machines.
        answers: each machine's results, as ``{number of another machine: error}``. The error is "" if the
            connection to that machine works.
    """
    failed = False
    for name, answer in zip(names, answers, strict=True):
        if answer.problem:
            failed = True
            yield fail("links", f"{name} has left: {answer.problem}", "look at that machine")
            continue
        for number, problem in answer.value.items():
            if problem:
                failed = True
                yield fail("links", f"{name} does not reach {names[int(number)]}: {problem}", _OPEN_FIX)
    if not failed:
        yield ok("links", f"each of the {len(names)} machines reaches the others on an arbitrary port")


_RESOLVE_SECONDS = 20.0


def examine_nodes(master: str, size: int, seconds: float, environ: Mapping[str, str]) -> Iterator[Row]:
    """Check that all ``size`` machines of the job can connect to ``master``, and that each machine can
    connect to every other machine. Yields the rows of the report. All machines must run this check at the
    same time."""
    host, _, port = master.rpartition(":")
    if not host or not (port.isdigit() and 0 < int(port) < 65_536):
        yield fail(
            "--master", f"{master} is not HOST:PORT", "an address of the first machine, a free port of it"
        )
        return
    address = resolved(host)
    if not address:
        fix = "give the address instead of the name, or add it to /etc/hosts of this machine"
        yield fail("--master", f"the name {host} is not known on {socket.gethostname()}", fix)
        return
    own, is_first = own_address(environ), is_local(address)
    problem = address_row(own, host, address, is_first=is_first)
    yield problem or ok("own address", f"{own}, announced to the others by the launcher")
    name = f"node {socket.gethostname()} {own}"
    try:
        with socket.create_server(("", 0), backlog=1024) as listener:  # connections need no accept()
            point, own_port = (address, int(port)), listener.getsockname()[1]
            with contextlib.closing(
                connect_processes(point, size, name, seconds, is_host=is_first)
            ) as meeting:
                yield ok("--master", f"all {size} machines have met at {master}: {', '.join(meeting.names)}")
                yield from examine_links(meeting, own, own_port)
    except RendezvousError as error:
        yield fail("--master", f"{master}: {error}", error.fix)
        yield from network(Target(world_size=2, environ=environ))


def resolved(host: str) -> str:
    """Return the IPv4 address of a host name, or "" if the name is unknown or no name server answers."""
    try:
        return within(_RESOLVE_SECONDS, lambda: socket.gethostbyname(host))
    except (OSError, UnicodeError):  # UnicodeError: a label is empty or too long
        return ""


def own_address(environ: Mapping[str, str]) -> str:
    """Return the address of this machine that Paddle's launcher will announce to the other machines:
    ``POD_IP`` if that is set, else the address of the host name, else 127.0.0.1."""
    if named := environ.get("POD_IP"):
        return named
    try:
        name = within(_RESOLVE_SECONDS, lambda: socket.getfqdn(socket.gethostname()))
    except TimeoutError:
        name = ""
    return (resolved(name) if name else "") or "127.0.0.1"


def address_row(own: str, host: str, master_address: str, *, is_first: bool) -> Row | None:
    """Return a report row if the job cannot start with the address ``own``; otherwise None. It cannot start
    if ``own`` is a loopback address or not an address of this machine. On the first machine, it also cannot
    start if ``own`` differs from ``host``.

    Args:
        own: the address of this machine that Paddle's launcher would announce.
        host: the first machine, as ``--master`` names it.
        master_address: the IP address of the first machine.
        is_first: whether this machine is the first machine.
    """
    better = host if is_first else route_to(master_address)
    fix = f"POD_IP={better} before the command on this machine" if better else "set POD_IP on this machine"
    if own.startswith("127."):
        return fail("own address", f"the host name resolves to {own}, which reaches no other machine", fix)
    if not is_local(own):
        return fail("own address", f"the launcher would announce {own}, which is not this machine's", fix)
    if is_first and host != own:
        return fail(
            "own address",
            f"--master names this machine as {host}, and the launcher announces it as {own}: it would wait "
            "for another machine to listen",
            f"give --master {own}:PORT on all machines, or {fix}",
        )
    return None
