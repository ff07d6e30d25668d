"""How the members of a meeting come together: the first listens, the others find it; or why they do not."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator

from ppfleetx.doctor.line import Line
from ppfleetx.doctor.meeting import (
    LEAST_QUIET_SECONDS,
    MARGIN_SECONDS,
    Clock,
    Guest,
    Host,
    MeetingError,
    Visitor,
)

_GREETING = "ppfleetx doctor"
_CONNECT_SECONDS, _AGAIN_SECONDS = 5.0, 0.1


def receive_guests(port: int, size: int, name: str, seconds: float) -> Host:
    """Listen until all others of ``size`` members have come.

    Raises:
        MeetingError: the port is taken, or somebody did not come; those who came are told.
    """
    try:
        listener = socket.create_server(("", port), backlog=size + 16)
    except OSError as error:
        raise MeetingError(
            f"port {port} of this machine cannot be opened: {error.strerror}",
            "another program, or a job that still runs, holds it: give all machines another free port",
        ) from error
    host = Host([name, *[""] * (size - 1)], quiet=max(seconds, LEAST_QUIET_SECONDS))
    deadline, turned_away = time.monotonic() + seconds, list[str]()
    with listener:
        while len(host.guests) < size - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(OSError):  # nobody, or a stranger
                connection, address = listener.accept()
                turned_away += _welcome(host, Line(connection), address[0], size)
    missing = [number for number in range(1, size) if number not in host.guests]
    if missing:
        came = ", ".join(host.names[number] for number in sorted(host.guests)) or "nobody"
        found = f"{len(missing)} of {size - 1} others did not come within {seconds:g} s (came: {came})"
        if not name.startswith("node"):
            found += f"; missing: ranks {', '.join(map(str, missing))}"
        if turned_away:
            found += f"; turned away: {'; '.join(dict.fromkeys(turned_away))}"
        for guest in host.guests.values():
            with contextlib.suppress(OSError):
                guest.line.send({"refused": found})
        host.close()
        cure = (
            "start the same command on every machine, with the same --master; a firewall must let them reach "
            "this port"
        )
        if not name.startswith("node"):
            cure += (
                "; of one that was started, look at its log (workerlog.N of its machine) and at its process"
            )
        raise MeetingError(found, cure)
    host.begin()
    return host


def _welcome(host: Host, line: Line, address: str, size: int) -> list[str]:
    """Hear who somebody is, and compare clocks; why who is no member of this job is turned away.

    Raises:
        OSError: a stranger, or somebody who is gone again.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    try:
        said = line.receive(deadline)
    except TimeoutError:
        line.close()
        return [f"{address}, from where a connection was opened and nothing came"]
    if not isinstance(said, dict) or said.get("greeting") != _GREETING:
        line.close()
        raise ConnectionAbortedError(errno.EPROTO, "a stranger")
    number = said["number"] if said["number"] is not None else len(host.guests) + 1
    why = ""
    if said["size"] != size:
        why = f"{host.names[0]} waits for {size} members, not {said['size']}"
    elif number in host.guests or not 0 < number < size:
        why = f"number {number} is there already, or is none of {size}"
    if why:
        line.send({"refused": why})
        line.close()
        return [f"{said['name']} ({address}): {why}"]
    asked, before = time.time(), time.perf_counter()
    line.send({"clock": None})
    theirs = line.receive(deadline)["clock"]
    trip = time.perf_counter() - before
    host.names[number] = f"{said['name']} ({address})" if said["number"] is None else said["name"]
    host.guests[number] = Guest(line)
    host.clocks[number] = Clock(theirs - asked - trip / 2, trip)
    return []


def visit(
    address: tuple[str, int], size: int, name: str, seconds: float, *, number: int | None = None
) -> Visitor:
    """Find the host at ``address`` and wait until all have come; ``number`` None: as the host counts.

    Raises:
        MeetingError: the host's name is not known, nobody listens there, nothing comes through, or the host
            says who is missing.
    """
    where = "{}:{}".format(*address)
    deadline = time.monotonic() + seconds
    line = Line(_connect(address, deadline, seconds))
    greeting = {"greeting": _GREETING, "size": size, "number": number, "name": name}
    try:
        line.send(greeting)
        said = line.receive(time.monotonic() + _CONNECT_SECONDS)
        if "refused" not in said:  # it asks for the clock
            line.send({"clock": time.time()})
            said = line.receive(deadline + MARGIN_SECONDS)
        if "refused" not in said:
            quiet = max(seconds, LEAST_QUIET_SECONDS)
            return Visitor(list(said["members"]), said["number"], line, where, quiet=quiet)
    except TimeoutError as error:
        line.close()
        raise MeetingError(
            f"a connection to {where} opens, and nothing comes through it",
            "a firewall or proxy drops what it carries, or another program holds that port: let it through, "
            "or give all machines another port",
        ) from error
    except (OSError, KeyError, TypeError) as error:
        line.close()
        raise MeetingError(
            f"what answers at {where} is not doctor, or ended: {error}",
            "another program holds that port of the first machine, or doctor ended there: look at its output",
        ) from error
    line.close()
    raise MeetingError(
        f"the first at {where} says: {said['refused']}",
        "start the same command on every machine, with the same --nnodes and --master",
    )


def _connect(address: tuple[str, int], deadline: float, seconds: float) -> socket.socket:
    """Try again until it succeeds; a name that is not known and the last failure are told apart."""
    while True:
        limit = max(0.1, min(_CONNECT_SECONDS, deadline - time.monotonic()))
        try:
            return socket.create_connection(address, limit)
        except OSError as error:
            problem = error
        if isinstance(problem, socket.gaierror) or time.monotonic() >= deadline:
            raise _unreachable(address, problem, seconds) from problem
        time.sleep(_AGAIN_SECONDS)


def _unreachable(address: tuple[str, int], error: OSError, seconds: float) -> MeetingError:
    where = "{}:{}".format(*address)
    if isinstance(error, socket.gaierror):
        return MeetingError(
            f"the name {address[0]} is not known here ({error.strerror})",
            "give the address instead of the name, or add it to /etc/hosts of this machine",
        )
    if isinstance(error, ConnectionRefusedError):
        return MeetingError(
            f"nobody listens at {where}, asked for {seconds:g} s",
            "start the same command on the first machine; is this its address and port?",
        )
    if isinstance(error, TimeoutError):
        return MeetingError(
            f"nothing comes back from {where}, asked for {seconds:g} s",
            "a firewall drops what goes to that port, or the address is of another network: open the port",
        )
    return MeetingError(
        f"{where} cannot be reached: {error.strerror}", "is the address right, and is the network up?"
    )


def reach(address: tuple[str, int], seconds: float) -> str:
    """Why a connection to ``address`` fails; empty where it does not."""
    try:
        socket.create_connection(address, seconds).close()
    except TimeoutError:
        return "nothing comes back"
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextlib.contextmanager
def listening(host: str) -> Iterator[int]:
    """A port of this machine at which connections are taken, and closed at once by the kernel's queue."""
    with socket.create_server((host, 0), backlog=1024) as listener:
        yield listener.getsockname()[1]
