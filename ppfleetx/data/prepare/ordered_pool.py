"""A function mapped over a stream by worker processes: results in order, few items in flight."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ppfleetx.config.errors import DataError

_IN_FLIGHT_PER_WORKER = 3

_function: Callable[[Any], Any] | None = None  # set in the workers


@contextlib.contextmanager
def map_in_order(
    function: Callable[[Any], Any], items: Iterable[Any], workers: int
) -> Iterator[Iterator[tuple[Any, Any]]]:
    """``(item, function(item))`` of each item, in order. ``workers=1`` runs in this process.

    The function is sent to each worker once. Leaving the block ends the workers; they also end when this
    process is killed. A worker that dies makes the iterator raise DataError.
    """
    if workers == 1:
        yield ((item, function(item)) for item in items)
        return
    # A fork costs nothing and needs no pickling; elsewhere forking is not safe or not there.
    method = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context(method),
        initializer=_start_worker,
        initargs=(function, os.getpid()),
    )
    try:
        pool.submit(int)  # starts the workers now, before the caller starts threads
        yield _results(pool, items, workers)
    finally:
        # Waits for the items being worked on, which are small; those not begun are dropped.
        pool.shutdown(wait=True, cancel_futures=True)


def _results(pool: ProcessPoolExecutor, items: Iterable[Any], workers: int) -> Iterator[tuple[Any, Any]]:
    waiting: deque[tuple[Any, Any]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(_work, item)))
            if len(waiting) >= _IN_FLIGHT_PER_WORKER * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died: it was killed, or memory ran out (fewer workers need less)"
        ) from error


def _start_worker(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    # Ctrl-C reaches the whole process group; the parent alone decides what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent has gone: a pool's worker would wait for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(item: Any) -> Any:
    assert _function is not None
    return _function(item)
