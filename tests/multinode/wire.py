"""A wire between two network namespaces with a bandwidth and a delay, for kernels without netem.

Each end is a tun device; a process of its own carries packets from one to the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import select
import struct
import time
from collections import deque
from collections.abc import Iterator

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 32_000
"""Large packets, so that a Python process can carry a gigabit a second."""
_MOST_UNDER_WAY = 4 << 20


@contextlib.contextmanager
def wire(bytes_per_second: float, delay: float) -> Iterator[tuple[str, str]]:
    """Names of two devices, in this namespace as yet, that are joined until the end.

    Args:
        bytes_per_second: in each direction.
        delay: seconds that a packet takes beside its bytes.
    """
    tag = os.getpid() % 10000
    names = (f"ppw{tag}a", f"ppw{tag}b")
    ends = [_device(name) for name in names]
    carriers = [
        multiprocessing.get_context("fork").Process(
            target=_carry, args=(source, target, bytes_per_second, delay), daemon=True
        )
        for source, target in (ends, ends[::-1])
    ]
    try:
        for carrier in carriers:
            carrier.start()
        yield names
    finally:
        for carrier in carriers:
            carrier.kill()
            carrier.join()
        for end in ends:
            os.close(end)


def _device(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    os.set_blocking(end, False)
    return end


def _carry(source: int, target: int, speed: float, delay: float) -> None:
    """Packets leave one after the other at ``speed`` and arrive ``delay`` later."""
    under_way: deque[tuple[float, bytes]] = deque()
    free, size = 0.0, 0
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            packet = under_way.popleft()[1]
            size -= len(packet)
            with contextlib.suppress(OSError):  # an end that is not up yet loses it, as a cable does
                os.write(target, packet)
        wait = under_way[0][0] - now if under_way else None
        if size > _MOST_UNDER_WAY:
            time.sleep(max(0.0, wait or 0.0))
            continue
        ready = select.select([source], [], [], None if wait is None else max(0.0, wait))[0]
        if not ready:
            continue
        with contextlib.suppress(OSError):
            packet = os.read(source, 65_536)
            free = max(free, time.monotonic()) + len(packet) / speed
            under_way.append((free + delay, packet))
            size += len(packet)
