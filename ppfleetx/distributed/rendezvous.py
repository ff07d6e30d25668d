"""How the ranks of a CPU job meet: each tells rank 0 its address, rank 0 tells all of them everybody's.

In place of Paddle's TCPStore, which waits in C++ for ranks that do not come and cannot say which. Here every
wait ends within a known time, with a sentence that names the address and the ranks that are missing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.cpu.watch import end_when_silent
from ppfleetx.distributed.cpu.wire import StartError
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.start import START_VARIABLE, start_timeout

_SAY_AFTER_SECONDS = 10.0  # a wait this long is said in the log
_CONNECT_SECONDS = 5.0
_AGAIN_SECONDS = 0.02
_LONGEST_LINE = 1 << 20
_LONGEST_GREETING = 1 << 10


@dataclass(frozen=True)
class Members:
    """What every rank knows once all have met.

    Attributes:
        token: 256 random bits that prove that a connection belongs to this job.
        addresses: host and port each rank listens at, by rank.
    """

    token: bytes
    addresses: tuple[tuple[str, int], ...]

    def name(self, rank: int) -> str:
        """``rank`` for people."""
        return "rank {} at {}:{}".format(rank, *self.addresses[rank])


def meet(rank: int, world_size: int, own: tuple[str, int]) -> Members:
    """Wait for all ranks of the job; every rank calls this with the address it listens at.

    Raises:
        StartError: not all ranks came within :func:`start_timeout`, one of them ended, or the meeting point
            cannot be used.
    """
    host, port = meeting_point()
    seconds = start_timeout()
    if rank == 0:
        return _Host(world_size, own, f"{host}:{port}", seconds).gather(port)
    return _Guest(rank, world_size, own, (host, port), seconds).join()


def meeting_point() -> tuple[str, int]:
    """Where rank 0 is met: the endpoint at which Paddle would keep the job's store.

    Raises:
        ConfigError: the environment names none.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (host and port):
        endpoints = os.environ.get("PADDLE_MASTER") or os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
        host, _, port = endpoints.split(",")[0].rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            "not the HOST:PORT where the ranks of the job meet; start them with python -m "
            "paddle.distributed.launch",
            key="PADDLE_MASTER",
            value=os.environ.get("PADDLE_MASTER", ""),
            place="environment",
        )
    return host, int(port)


class _Host:
    """Rank 0: collects the others' addresses."""

    def __init__(self, world_size: int, own: tuple[str, int], point: str, seconds: float) -> None:
        self._world_size, self._point, self._seconds = world_size, point, seconds
        self._addresses: dict[int, tuple[str, int]] = {0: own}
        self._visitors: dict[int, _Visitor] = {}  # by rank
        self._connections = contextlib.ExitStack()

    def gather(self, port: int) -> Members:
        """Listen at ``port`` until everybody has come, and tell everybody who has."""
        try:
            listener = socket.create_server(("", port), backlog=self._world_size + 16)
        except OSError as error:
            raise StartError(
                f"rank 0 cannot listen at {self._point}, where the ranks of this job are to meet "
                f"({error.strerror}): another program holds the port. Start again, then the launcher takes "
                "another one; or say which with MASTER_ADDR and MASTER_PORT"
            ) from error
        with listener, self._connections:
            try:
                self._receive_all(listener)
            except StartError as error:
                self._answer({"error": str(error)})
                raise
            by_rank = tuple(self._addresses[rank] for rank in range(self._world_size))
            members = Members(secrets.token_bytes(32), by_rank)
            self._answer({"token": members.token.hex(), "addresses": by_rank})
            return members

    def _receive_all(self, listener: socket.socket) -> None:
        deadline = _Deadline(self._seconds)
        selector = self._connections.enter_context(selectors.DefaultSelector())
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        while missing := sorted(set(range(self._world_size)) - set(self._addresses)):
            text = f"{_ranks(missing)} to come to {self._point}"
            if deadline.passed(f"rank 0 waits for {text}"):
                raise StartError(
                    f"rank 0 waited {self._seconds:g} s for {text}: were they started, and do they reach "
                    f"that address? {START_VARIABLE} sets the limit"
                )
            for key, _ in selector.select(deadline.next_look()):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):
                        visitor = self._let_in(listener)
                        selector.register(visitor.connection, selectors.EVENT_READ, visitor)
                elif not self._hear(key.data):
                    selector.unregister(key.fileobj)
                    key.data.connection.close()

    def _let_in(self, listener: socket.socket) -> _Visitor:
        connection = self._connections.enter_context(listener.accept()[0])
        connection.setblocking(False)
        end_when_silent(connection)
        return _Visitor(connection)

    def _hear(self, visitor: _Visitor) -> bool:
        """Take what a visitor says; False when there is nothing more to hear from it.

        Raises:
            StartError: a rank that had come has gone.
        """
        try:
            data = visitor.connection.recv(1 << 12)
        except OSError as error:
            data, visitor.reason = b"", str(error.strerror)
        if not data:
            if visitor.rank is None:
                return False  # a stranger
            raise StartError(
                "rank {} at {}:{} ended before all ranks were there: {}".format(
                    visitor.rank, *self._addresses[visitor.rank], visitor.reason
                )
            )
        visitor.said += data
        if visitor.rank is None and b"\n" in visitor.said:
            return self._admit(visitor)
        return len(visitor.said) <= _LONGEST_GREETING

    def _admit(self, visitor: _Visitor) -> bool:
        try:
            said = json.loads(visitor.said)
            rank, world_size, (host, port) = said["rank"], said["world_size"], said["address"]
            address = str(host), int(port)
        except (ValueError, TypeError, KeyError):
            return False
        if world_size != self._world_size or rank not in range(1, self._world_size):
            size = f"{self._world_size} ranks, not {world_size}"
            visitor.answer({"error": f"the job that meets at {self._point} has {size}"})
            return False
        if rank in self._addresses:
            visitor.answer({"error": f"rank {rank} is there already: two jobs meet at {self._point}"})
            return False
        visitor.rank, self._addresses[rank], self._visitors[rank] = rank, address, visitor
        return True

    def _answer(self, message: dict[str, Any]) -> None:
        for visitor in self._visitors.values():
            visitor.answer(message)


@dataclass
class _Visitor:
    """Somebody who has connected to rank 0."""

    connection: socket.socket
    said: bytearray = field(default_factory=bytearray)
    rank: int | None = None
    reason: str = "connection closed"

    def answer(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # then it is gone, which it tells by itself
            self.connection.settimeout(_CONNECT_SECONDS)
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class _Guest:
    """Another rank: finds rank 0 and waits for its answer."""

    def __init__(
        self, rank: int, world_size: int, own: tuple[str, int], point: tuple[str, int], seconds: float
    ) -> None:
        self._rank, self._world_size, self._own = rank, world_size, own
        self._point, self._seconds = point, seconds
        self._where = "{}:{}".format(*point)

    def join(self) -> Members:
        deadline = _Deadline(self._seconds)
        with self._connect(deadline) as connection:
            greeting = {"rank": self._rank, "world_size": self._world_size, "address": self._own}
            try:
                connection.sendall(json.dumps(greeting).encode() + b"\n")
                answer = json.loads(self._read(connection))
                if "error" not in answer:
                    addresses = tuple((str(host), int(port)) for host, port in answer["addresses"])
                    return Members(bytes.fromhex(answer["token"]), addresses)
            except OSError as error:
                raise StartError(self._lost(error.strerror or "connection closed")) from error
            except (ValueError, TypeError, KeyError) as error:
                raise StartError(
                    f"rank {self._rank}: what answers at {self._where} is not rank 0 of this job: another "
                    "program holds the port"
                ) from error
        raise StartError(f"rank {self._rank}: rank 0 at {self._where} says: {answer['error']}")

    def _connect(self, deadline: _Deadline) -> socket.socket:
        waiting = f"rank {self._rank} waits for rank 0 to listen at {self._where}"
        while True:
            try:
                connection = socket.create_connection(self._point, _CONNECT_SECONDS)
                if connection.getsockname() == connection.getpeername():
                    # To a port of one's own that nobody listens at yet, TCP may connect to itself.
                    connection.close()
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            except OSError as error:
                if deadline.passed(f"{waiting} ({error})"):
                    raise StartError(
                        f"rank {self._rank}: no connection to rank 0 at {self._where} within "
                        f"{self._seconds:g} s ({error}): was it started, is the address right, and does a "
                        f"firewall let this machine through? {START_VARIABLE} sets the limit"
                    ) from error
                time.sleep(_AGAIN_SECONDS)
            else:
                end_when_silent(connection)
                return connection

    def _read(self, connection: socket.socket) -> bytes:
        """Rank 0's answer, which began to wait before this rank came and gives up by itself."""
        deadline = _Deadline(self._seconds + _CONNECT_SECONDS)
        waiting = f"rank {self._rank} has told rank 0 at {self._where} and waits for the others"
        line = bytearray()
        while not line.endswith(b"\n"):
            if deadline.passed(waiting):
                raise OSError(0, f"no answer within {self._seconds:g} s")
            connection.settimeout(deadline.next_look())
            with contextlib.suppress(TimeoutError):
                data = connection.recv(1 << 16)
                if not data:
                    raise ConnectionError(0, "connection closed")
                line += data
            if len(line) > _LONGEST_LINE:
                raise ValueError("not an answer")
        return bytes(line)

    def _lost(self, reason: str) -> str:
        return f"rank {self._rank}: rank 0 at {self._where} is gone before all ranks had met: {reason}"


class _Deadline:
    """A limited wait that is said in the log when it takes long."""

    def __init__(self, seconds: float) -> None:
        self._begin, self._seconds, self._said = time.monotonic(), seconds, False

    def passed(self, what: str) -> bool:
        """Whether the time is up; otherwise ``what`` is logged once, when some time has gone by."""
        waited = time.monotonic() - self._begin
        if waited > _SAY_AFTER_SECONDS and not self._said:
            self._said = True
            get_logger().info(f"{what}, for {self._seconds:g} s at most")
        return waited >= self._seconds

    def next_look(self) -> float:
        """Seconds to wait before asking again, more than 0."""
        waited = time.monotonic() - self._begin
        until = self._seconds if self._said else min(self._seconds, _SAY_AFTER_SECONDS)
        return max(until - waited, 0.0) + 0.001


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
