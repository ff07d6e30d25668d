"""Detect that another host has failed. Each pair of ranks on different hosts has an idle connection with TCP
keepalive probes, which the kernel answers even while the process computes or is stopped."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

from ppfleetx.utils.lost_peers import seconds_in

SILENCE_VARIABLE = "PADDLE_CPU_COMM_SILENCE"
_SILENCE_SECONDS = 30.0
_PROBES = 4
# Seconds to wait after a connection closes, because the last messages of a process that ends may still be in
# flight.
_AFTER_THE_END_SECONDS = 5.0


def silence_limit() -> float:
    """Return the time limit, in seconds, after which a host that does not answer counts as lost. The variable
    ``PADDLE_CPU_COMM_SILENCE`` sets it (default 30). Raises ConfigError if the variable is not a number of at
    least 3."""
    return seconds_in(SILENCE_VARIABLE, _SILENCE_SECONDS, least=3.0)


def end_when_silent(connection: socket.socket) -> None:
    """Make an idle connection fail if the other host does not answer keepalive probes for
    :func:`silence_limit` seconds. Do not use this for connections that carry much data."""
    limit = silence_limit()
    interval = max(1, int(limit / (_PROBES + 2)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(limit) - _PROBES * interval))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # If the connection carried much data, the kernel would mistake a slow reader for a lost host.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limit))


class HostWatch:
    """A thread that watches idle connections to other hosts, and calls ``lost(rank, reason)`` if a connection
    fails. If the other rank closes its connection, the thread calls ``lost`` a few seconds later, because the
    last messages of that rank may still be in flight."""

    def __init__(self, connections: Mapping[int, socket.socket], lost: Callable[[int, str], None]) -> None:
        self._connections, self._lost = dict(connections), lost
        self._silence = silence_limit()
        self._selector = selectors.DefaultSelector()
        for rank, connection in self._connections.items():
            end_when_silent(connection)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, rank)
        if self._connections:
            threading.Thread(target=self._run, name="cpu-comm-watch", daemon=True).start()

    def close_in_child(self) -> None:
        """Close a forked child's copies of the connections, which would otherwise stay open when the parent
        ends."""
        for connection in self._connections.values():
            os.close(connection.detach())
        self._connections = {}

    def _run(self) -> None:
        ended: dict[int, float] = {}  # rank -> time at which to report that it has ended
        watched = len(self._connections)
        while watched or ended:
            pause = max(0.0, min(ended.values()) - time.monotonic()) if ended else None
            for key, _ in self._selector.select(pause):
                self._selector.unregister(key.fileobj)
                watched -= 1
                reason = self._reason(key.fileobj)
                if reason is None:
                    ended[key.data] = time.monotonic() + _AFTER_THE_END_SECONDS
                else:
                    self._lost(key.data, reason)
            for rank in [rank for rank, when in ended.items() if when <= time.monotonic()]:
                del ended[rank]
                self._lost(rank, "connection closed")

    def _reason(self, connection: socket.socket) -> str | None:
        try:
            connection.recv(1)
        except ConnectionResetError:
            return None
        except OSError as error:
            return f"no sign of life from its host for {self._silence:g} s ({error.strerror})"
        return None
