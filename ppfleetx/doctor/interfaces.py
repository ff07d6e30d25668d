"""The network interfaces of this machine, and those that NCCL and Gloo are to use."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppfleetx.doctor.case import Case
from ppfleetx.doctor.rows import Row, fail, ok, warn

# linux/sockios.h and linux/if.h
_GET_ADDRESS, _GET_FLAGS = 0x8915, 0x8913
_UP, _LOOPBACK = 0x1, 0x8
_NOT_NCCL = ("lo", "docker")  # NCCL does not use them unless they are named


@dataclass(frozen=True)
class Interface:
    """One interface; ``address`` is its IPv4 address or empty."""

    name: str
    address: str
    is_up: bool
    is_loopback: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.address or 'without an address'}{'' if self.is_up else ' (down)'}"


def interfaces() -> list[Interface]:
    """The interfaces of this machine, or of the network namespace of this process."""
    found: list[Interface] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # containers come and go
                found.append(_interface(probe, name))
    return found


def _interface(probe: socket.socket, name: str) -> Interface:
    request = struct.pack("256s", name.encode()[:15])
    (flags,) = struct.unpack("H", fcntl.ioctl(probe.fileno(), _GET_FLAGS, request)[16:18])
    try:
        address = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24])
    except OSError:
        address = ""
    return Interface(name, address, bool(flags & _UP), bool(flags & _LOOPBACK))


def network(case: Case) -> Iterator[Row]:
    """All interfaces, and those that the environment names."""
    found = interfaces()
    yield ok("interfaces", ", ".join(map(str, found)))
    yield from named_rows(case, found)


def named_addresses(case: Case) -> dict[str, list[str]]:
    """The addresses of the usable interfaces that each variable names."""
    there = interfaces()
    return {
        variable: [one.address for one in choose(value, there) if one.is_up and one.address]
        for variable, choose in _VARIABLES
        if (value := case.environ.get(variable, ""))
    }


def named_rows(case: Case, found: Sequence[Interface]) -> Iterator[Row]:
    """Rows of ``NCCL_SOCKET_IFNAME`` and ``GLOO_SOCKET_IFNAME``, if set."""
    several = case.world_size > case.local_size
    for variable, choose in _VARIABLES:
        value = case.environ.get(variable, "")
        if value:
            yield _named_row(variable, value, choose(value, found), found, several=several)


def _named_row(
    variable: str, value: str, chosen: Sequence[Interface], found: Sequence[Interface], *, several: bool
) -> Row:
    usable = [one for one in chosen if one.is_up and one.address]
    others = ", ".join(one.name for one in found if one.is_up and one.address and not one.is_loopback)
    cure = f"set {variable} on this machine to one of: {others or 'none is up with an address'}"
    if not chosen:
        return fail(variable, f"{value}: this machine has no such interface", cure)
    if not usable:
        return fail(variable, f"{value}: {', '.join(map(str, chosen))} cannot be used", cure)
    if several and all(one.is_loopback for one in usable):
        return fail(variable, f"{value} is the loopback, which reaches no other machine", cure)
    if len(usable) > 1 and variable.startswith("GLOO"):
        return warn(variable, f"{value} names several", cure)
    return ok(variable, f"{value}: {', '.join(map(str, usable))}")


def nccl_choice(value: str, found: Sequence[Interface]) -> list[Interface]:
    """The interfaces that NCCL chooses for ``NCCL_SOCKET_IFNAME``, by its documentation.

    The value has prefixes with commas between them; ``=`` in front means whole names, ``^`` all but these.
    """
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
    """Whether an IPv4 address is one of this machine's."""
    is_first = any(one.address == address for one in interfaces())  # also if it is down
    return is_first or address.startswith("127.") or route_to(address) == address


def route_to(address: str) -> str:
    """The address of this machine from which packets to ``address`` leave; empty without a route. For one of
    its own addresses it is that address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        socket.inet_aton(address)  # not a name, which a name server would have to resolve
        probe.connect((address, 9))  # sends nothing
        return probe.getsockname()[0]
    return ""


_VARIABLES = (("NCCL_SOCKET_IFNAME", nccl_choice), ("GLOO_SOCKET_IFNAME", _exact))
