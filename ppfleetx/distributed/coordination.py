"""Exchange values between all ranks of a job, raise an error of one rank on all ranks, and let the first rank
of each node do work for the node's other ranks. Unless a function says otherwise, all ranks must call the
functions that take a context, in the same order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ppfleetx.config.errors import PeerEndedError, UserError
from ppfleetx.config.message_text import ranks_text
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.cpu.transport import time_limit
from ppfleetx.resilience.flight_recorder import RECORD
from ppfleetx.utils.launcher_env import local_rank, local_size

T = TypeVar("T")

_BEAT_SECONDS = 30.0
_HELPER = "first-on-node"
_MOST_MESSAGES = 8  # the maximum number of different messages in one error


class JointError(UserError):
    """Raised on all ranks of a job when at least one rank has raised a :class:`UserError`. The message joins
    the messages of the failed ranks (:func:`joint_message`). A rank whose own error already has this message
    raises that error instead."""


def beat_seconds() -> float:
    """Return the interval, in seconds, between heartbeats of ranks that wait for a long task. It is 30
    seconds, or a third of the communication timeout if that is shorter."""
    return min(_BEAT_SECONDS, time_limit() / 3 or _BEAT_SECONDS)


def gather(ctx: ParallelContext, value: Any) -> list[Any]:
    """Return the ``value`` of every rank, in rank order. ``value`` must be serializable as JSON."""
    if ctx.world_size == 1:
        return [value]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = gather_numbers(ctx, [content.size])[:, 0]
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: content.size] = content
    parts = _all_gather(ctx, padded)
    return [json.loads(part[:size].tobytes()) for part, size in zip(parts, sizes.tolist(), strict=True)]


def gather_numbers(ctx: ParallelContext, numbers: Sequence[int]) -> np.ndarray:
    """Return the integers of all ranks as an int64 array ``[rank, index]``. Every rank must pass the same
    number of integers."""
    mine = np.asarray(numbers, np.int64)
    return mine[None] if ctx.world_size == 1 else _all_gather(ctx, mine)


def any_rank(ctx: ParallelContext, flag: object) -> bool:
    return bool(gather_numbers(ctx, [1 if flag else 0]).any())


@contextlib.contextmanager
def joint_errors(ctx: ParallelContext, *, name_ranks: bool = True) -> Iterator[None]:
    """Context manager that raises an error of any rank on all ranks at the end of the block
    (:func:`raise_on_all_ranks`). ``name_ranks`` says whether the message of a UserError names the ranks that
    raised it (:func:`joint_message`). The code in the block must not communicate."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again
        raise_on_all_ranks(ctx, error, name_ranks=name_ranks)
    else:
        raise_on_all_ranks(ctx, None, name_ranks=name_ranks)


def raise_on_all_ranks(ctx: ParallelContext, error: BaseException | None, *, name_ranks: bool = True) -> None:
    """Raise an error on all ranks if any rank passes an ``error``. If all passed errors are UserErrors, every
    rank raises a UserError with the messages of the failed ranks. A rank that passes any other error, such as
    a bug, raises that error. The other ranks then raise a PeerEndedError with the message of that error,
    instead of waiting for the failed rank."""
    if ctx.world_size == 1:
        if error is not None:
            raise error
        return
    if error is not None and not isinstance(error, UserError):
        with contextlib.suppress(Exception):  # a lost rank must not hide this error
            gather(ctx, [False, f"{type(error).__name__}: {error}"])
        raise error
    found = gather(ctx, None if error is None else [True, str(error)])
    failed = [None if one is None or one[0] else one[1] for one in found]
    if any(text is not None for text in failed):
        raise PeerEndedError(f"another rank has failed: {joint_message(failed)}") from error
    if any(one is not None for one in found):
        message = joint_message([one and one[1] for one in found], name_ranks=name_ranks)
        if error is not None and message == str(error):
            raise error
        raise JointError(message) from error


def joint_message(texts: Sequence[str | None], *, name_ranks: bool = True) -> str:
    """Join the error messages of the ranks into one message, such as ``ranks 0, 1: disk full; rank 2: no such
    file``. ``texts`` has an entry for each rank; None means no error. If all messages are equal, ranks are
    named only if ``name_ranks`` is True and some rank has no error. If there are too many distinct messages,
    only the ranks of the last ones are named."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    first, *others = ranks_of
    if not others and (not name_ranks or len(ranks_of[first]) == len(texts)):
        return first
    parts = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]
    rest = [rank for ranks in list(ranks_of.values())[_MOST_MESSAGES:] for rank in ranks]
    return "; ".join(parts[:_MOST_MESSAGES]) + (f"; also {ranks_text(rest)}" if rest else "")


def first_on_each_node(ctx: ParallelContext, make: Callable[[], T]) -> T:
    """Run ``make()`` on the first rank of each node, then on the node's other ranks, and return this rank's
    result. The other ranks wait, without a time limit, until the first ranks of all nodes are done. All ranks
    must call this. A UserError on any rank is raised on every rank."""
    if ctx.world_size == 1:
        return make()
    is_first = local_rank() == 0
    made = _make_with_heartbeats(ctx, make if is_first else None)
    with joint_errors(ctx, name_ranks=_has_other_nodes(ctx)):
        if not is_first:
            made = make()
    return made


def ranks_per_node(ctx: ParallelContext) -> int | None:
    """Return the number of ranks on each node, as set by Paddle's launcher. Returns None if the number is not
    set or differs between nodes."""
    sizes = np.unique(gather_numbers(ctx, [local_size()]))
    return int(sizes[0]) if len(sizes) == 1 and sizes[0] else None


def _has_other_nodes(ctx: ParallelContext) -> bool:
    return local_size() != ctx.world_size


def _make_with_heartbeats(ctx: ParallelContext, make: Callable[[], T] | None) -> T | None:
    """Run ``make`` in a thread and return its result. Meanwhile, exchange heartbeats with the other ranks,
    until every rank has finished. A rank without work passes None and only waits."""
    with ThreadPoolExecutor(1, thread_name_prefix=_HELPER) as pool:
        future = pool.submit(make or (lambda: None))
        with RECORD.awaiting(_HELPER, polls=True):
            while any_rank(ctx, not _done(future)):
                pass
    raise_on_all_ranks(ctx, future.exception(), name_ranks=_has_other_nodes(ctx))
    return future.result()


def _done(future: Any) -> bool:
    with contextlib.suppress(TimeoutError):
        future.exception(timeout=beat_seconds())
    return future.done()


def _all_gather(ctx: ParallelContext, mine: np.ndarray) -> np.ndarray:
    """Return the one-dimensional arrays ``mine`` of all ranks as one array ``[rank, index]``. All must have
    the same length."""
    import paddle
    from paddle import distributed

    from ppfleetx.distributed.host_device_copy import read, upload

    own = upload(mine)
    received = paddle.empty([ctx.world_size * mine.size], own.dtype)
    distributed.stream.all_gather(received, own)
    return read(received).reshape(ctx.world_size, mine.size)
