"""Every kind of communication in every group of the plan: the right result, and how fast it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import distributed

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.device import groups_messages, is_card, on_card
from ppfleetx.doctor.rows import Row, fail, ok
from ppfleetx.doctor.storage import words

CPU_SIZES = (4 << 10, 256 << 10, 4 << 20)
CARD_SIZES = (4 << 10, 1 << 20, 16 << 20, 128 << 20)
"""Bytes that travel."""
_TIMES = 3
_TYPES = ("int64", "float16", "bfloat16")  # beside float32, with the smallest size
_ITEM_BYTES = 4
_ROUNDING = {"float16": 1e-2, "bfloat16": 1e-2}
_CURE = (
    "the link, its driver or its library is at fault: NCCL_DEBUG=INFO shows the way NCCL takes; try "
    "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 to find which"
)


@dataclass(frozen=True)
class Member:
    """This process in a group: global ranks in order, and which of them it is."""

    title: str
    group: Any
    ranks: Sequence[int]
    place: int

    @property
    def size(self) -> int:
        """Members of the group."""
        return len(self.ranks)

    def input(self, number: int, count: int) -> np.ndarray:
        """What member ``number`` brings: small whole numbers, whose sums are exact in 16 bits."""
        return (np.arange(count) + number) % 3


def groups_of(ctx: ParallelContext) -> Iterator[Member]:
    """The job, and each group of the plan that this process is in."""
    yield Member("job", None, range(ctx.world_size), ctx.rank)
    for axis, group in ctx.groups.items():
        if group.nranks > 1:
            yield Member(axis, group, list(group.ranks), list(group.ranks).index(ctx.rank))


# -- the operations: (tensor to bring, run it, what must come out)

Operation = Callable[[Member, int, str], tuple[Callable[[], paddle.Tensor], np.ndarray]]


def _all_reduce(member: Member, count: int, dtype: str) -> tuple[Callable[[], paddle.Tensor], np.ndarray]:
    mine = paddle.to_tensor(member.input(member.place, count)).astype(dtype)

    def run() -> paddle.Tensor:
        result = mine.clone()
        distributed.all_reduce(result, group=member.group)
        return result

    return run, sum(member.input(number, count) for number in range(member.size))


def _all_gather(member: Member, count: int, dtype: str) -> tuple[Callable[[], paddle.Tensor], np.ndarray]:
    count = max(1, count // member.size)
    mine = paddle.to_tensor(member.input(member.place, count)).astype(dtype)

    def run() -> paddle.Tensor:
        parts: list[paddle.Tensor] = []
        distributed.all_gather(parts, mine, group=member.group)
        return paddle.concat(parts)

    return run, np.concatenate([member.input(number, count) for number in range(member.size)])


def _reduce_scatter(member: Member, count: int, dtype: str) -> tuple[Callable[[], paddle.Tensor], np.ndarray]:
    part = max(1, count // member.size)
    mine = paddle.to_tensor(member.input(member.place, part * member.size)).astype(dtype)

    def run() -> paddle.Tensor:
        result = paddle.empty([part], dtype)
        distributed.stream.reduce_scatter(result, mine, group=member.group)
        return result

    whole = sum(member.input(number, part * member.size) for number in range(member.size))
    return run, whole[member.place * part : (member.place + 1) * part]


def _broadcast(member: Member, count: int, dtype: str) -> tuple[Callable[[], paddle.Tensor], np.ndarray]:
    mine = paddle.to_tensor(member.input(member.place, count)).astype(dtype)

    def run() -> paddle.Tensor:
        result = mine.clone()
        distributed.broadcast(result, member.ranks[0], group=member.group)
        return result

    return run, member.input(0, count)


def _all_to_all(member: Member, count: int, dtype: str) -> tuple[Callable[[], paddle.Tensor], np.ndarray]:
    part = max(1, count // member.size)
    mine = paddle.to_tensor(member.input(member.place, part * member.size)).astype(dtype)

    def run() -> paddle.Tensor:
        result = paddle.empty_like(mine)
        distributed.alltoall_single(result, mine, group=member.group)
        return result

    own = slice(member.place * part, (member.place + 1) * part)
    brought = [member.input(number, part * member.size)[own] for number in range(member.size)]
    return run, np.concatenate(brought)


def _send_receive(member: Member, count: int, dtype: str) -> tuple[Callable[[], paddle.Tensor], np.ndarray]:
    mine = paddle.to_tensor(member.input(member.place, count)).astype(dtype)
    following, before = (member.place + 1) % member.size, (member.place - 1) % member.size

    def run() -> paddle.Tensor:
        result = paddle.empty_like(mine)
        messages = [
            distributed.P2POp(distributed.isend, mine, member.ranks[following], member.group),
            distributed.P2POp(distributed.irecv, result, member.ranks[before], member.group),
        ]
        if member.place % 2 and not groups_messages(paddle.get_device()):
            messages.reverse()  # one by one, every second rank has to receive first
        for task in distributed.batch_isend_irecv(messages):
            task.wait()
        return result

    return run, member.input(before, count)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send and receive": _send_receive,
}


def examine_groups(
    ctx: ParallelContext, tell: Callable[[str], None], sizes: Sequence[int] | None = None
) -> Iterator[Row]:
    """Rows of every operation in every group of this process; all processes of the job call this.

    Args:
        ctx: this process's place.
        tell: is told what comes next.
        sizes: bytes that travel; None: those of the device.
    """
    sizes = sizes or (CARD_SIZES if is_card(ctx.device) else CPU_SIZES)
    for member in groups_of(ctx):
        for name, operation in OPERATIONS.items():
            tell(f"{name} of the {member.title} group {list(member.ranks)}")
            yield examine_operation(member, name, operation, sizes)


def examine_operation(member: Member, name: str, operation: Operation, sizes: Sequence[int]) -> Row:
    """One operation in one group: right in every type, and its speed by size in float32.

    A process that gets a wrong result goes on: the others would wait for it.
    """
    title, told, problems, numbers = f"{name} ({member.title})", [], [], {}
    for dtype in _TYPES:
        run, expected = operation(member, sizes[0] // _ITEM_BYTES, dtype)
        problems += [f"{dtype}: {problem}" for problem in _problem(run(), expected, dtype)]
    for size in sizes:
        run, expected = operation(member, size // _ITEM_BYTES, "float32")
        problems += [f"{words(size)}: {problem}" for problem in _problem(run(), expected, "float32")]
        speed = size / _seconds(run)
        told.append(f"{words(size)} at {words(speed)}/s")
        numbers[f"bytes_per_second_{size}"] = speed
    if problems:
        return fail(title, f"group {list(member.ranks)}, {problems[0]}", _CURE)
    return ok(title, ", ".join(told), **numbers)


def _problem(result: paddle.Tensor, expected: np.ndarray, dtype: str) -> list[str]:
    """What is wrong with a result: nothing, or one sentence."""
    found = result.astype("float32").numpy()
    wrong = ~np.isclose(found, expected, rtol=_ROUNDING.get(dtype, 0.0), atol=0.0)
    if not wrong.any():
        return []
    first = int(np.argmax(wrong))
    text = f"{int(wrong.sum())} of {wrong.size} numbers are wrong"
    return [f"{text}; number {first} is {found[first]:g} and not {expected[first]:g}"]


def _seconds(run: Callable[[], paddle.Tensor]) -> float:
    _wait()
    begin = time.perf_counter()
    for _ in range(_TIMES):
        run()
    _wait()
    return (time.perf_counter() - begin) / _TIMES


def _wait() -> None:
    """Until the device has done what it was given; the CPU has."""
    if on_card():
        paddle.device.synchronize()
