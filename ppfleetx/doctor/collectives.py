"""Check of ``ppfleetx doctor`` on the result and speed of every collective in every process group."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import distributed

from ppfleetx.config.message_text import bytes_text
from ppfleetx.distributed.collectives import alltoall_rows
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.device import is_card, on_card, supports_batched_p2p
from ppfleetx.doctor.results import Row, fail, ok

CPU_SIZES = (4 << 10, 256 << 10, 4 << 20)
CARD_SIZES = (4 << 10, 1 << 20, 16 << 20, 128 << 20)
"""Message sizes in bytes."""
_TIMES = 3
_TYPES = ("int64", "float16", "bfloat16")  # tested with the smallest size; float32 with all sizes
_ITEM_BYTES = 4
_ROUNDING = {"float16": 1e-2, "bfloat16": 1e-2}
_FIX = (
    "the link, its driver or its library is at fault: NCCL_DEBUG=INFO shows the path that NCCL uses; try "
    "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 to find out"
)


@dataclass(frozen=True)
class Member:
    title: str
    group: Any
    ranks: Sequence[int]
    place: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def part(self, array: np.ndarray) -> np.ndarray:
        return np.split(array, self.size)[self.place]


def groups_of(ctx: ParallelContext) -> Iterator[Member]:
    """Yield the process groups of this process: first the group of all ranks, then the groups of the parallel
    plan that have more than one rank."""
    yield Member("job", None, range(ctx.world_size), ctx.rank)
    for axis, group in ctx.groups.items():
        if group.nranks > 1:
            yield Member(axis, group, list(group.ranks), list(group.ranks).index(ctx.rank))


# -- the collectives: how to run each, and how to compute its expected result from the inputs of all members


def _all_reduce(member: Member, mine: paddle.Tensor) -> paddle.Tensor:
    result = mine.clone()
    distributed.all_reduce(result, group=member.group)
    return result


def _all_gather(member: Member, mine: paddle.Tensor) -> paddle.Tensor:
    parts: list[paddle.Tensor] = []
    distributed.all_gather(parts, mine, group=member.group)
    return paddle.concat(parts)


def _reduce_scatter(member: Member, mine: paddle.Tensor) -> paddle.Tensor:
    result = paddle.empty([mine.shape[0] // member.size], mine.dtype)
    distributed.stream.reduce_scatter(result, mine, group=member.group)
    return result


def _broadcast(member: Member, mine: paddle.Tensor) -> paddle.Tensor:
    result = mine.clone()
    distributed.broadcast(result, member.ranks[0], group=member.group)
    return result


def _all_to_all(member: Member, mine: paddle.Tensor) -> paddle.Tensor:
    result = paddle.empty_like(mine)
    distributed.alltoall_single(result, mine, group=member.group)
    return result


def _uneven_all_to_all(member: Member, mine: paddle.Tensor) -> paddle.Tensor:
    sent = np.diff(_uneven_ends(member, mine.shape[0]), prepend=0)
    return alltoall_rows(mine, sent, [sent[member.place]] * member.size, member.group)


def _uneven_ends(member: Member, count: int) -> np.ndarray:
    """Divide ``count`` rows unevenly among the members of a group, to test an all-to-all with unequal message
    sizes. Returns the end index of each member's rows, such as ``[1, 3, 6]`` for 6 rows and 3 members."""
    return count * np.arange(1, member.size + 1).cumsum() // (member.size * (member.size + 1) // 2)


def _uneven_parts(member: Member, inputs: list[np.ndarray]) -> np.ndarray:
    ends = _uneven_ends(member, len(inputs[0]))
    return np.concatenate([np.split(one, ends[:-1])[member.place] for one in inputs])


def _send_receive(member: Member, mine: paddle.Tensor) -> paddle.Tensor:
    result = paddle.empty_like(mine)
    after, before = (member.ranks[(member.place + step) % member.size] for step in (1, -1))
    messages = [
        distributed.P2POp(distributed.isend, mine, after, member.group),
        distributed.P2POp(distributed.irecv, result, before, member.group),
    ]
    if member.place % 2 and not supports_batched_p2p(paddle.get_device()):
        messages.reverse()  # messages are sent one by one, so every second rank must receive first
    for task in distributed.batch_isend_irecv(messages):
        task.wait()
    return result


def inputs_of(count: int, size: int) -> list[np.ndarray]:
    """Return the inputs of ``size`` ranks, each ``[count]`` float32. They are small integers of both signs,
    so that the sums of a thousand ranks, too, are exact in 16-bit types. Only four of the arrays differ, and
    the others take no memory."""
    first, *others = (
        np.tile(np.array(numbers, np.float32), -(-count // len(numbers)))[:count]
        for numbers in ((1, 2, 3, 4, 5), (-1, 0, 1), (0, 1, -1), (1, -1, 0))
    )
    return [first, *(others[rank % 3] for rank in range(1, size))]


def _sum(inputs: list[np.ndarray]) -> np.ndarray:
    different, counts = {id(one): one for one in inputs}, Counter(map(id, inputs))
    return sum(counts[key] * one for key, one in different.items())


Run = Callable[[Member, paddle.Tensor], paddle.Tensor]
Expect = Callable[[Member, list[np.ndarray]], np.ndarray]
OPERATIONS: dict[str, tuple[Run, Expect]] = {
    "all_reduce": (_all_reduce, lambda member, inputs: _sum(inputs)),
    "all_gather": (_all_gather, lambda member, inputs: np.concatenate(inputs)),
    "reduce_scatter": (_reduce_scatter, lambda member, inputs: member.part(_sum(inputs))),
    "broadcast": (_broadcast, lambda member, inputs: inputs[0]),
    "all_to_all": (_all_to_all, lambda member, inputs: np.concatenate([member.part(one) for one in inputs])),
    "send and receive": (_send_receive, lambda member, inputs: inputs[member.place - 1]),
    "uneven all_to_all": (_uneven_all_to_all, _uneven_parts),
}
"""The collectives by name: (function that runs the collective, function that computes its expected result).
The last collective is only tested in expert-parallel groups."""


def examine_groups(
    ctx: ParallelContext, announce: Callable[[str], None], sizes: Sequence[int] | None = None
) -> Iterator[Row]:
    """Test the collectives in every process group of this process, and yield a report row for each test. All
    processes of the job must call this function. ``announce`` gets the name of each test before it starts.
    ``sizes`` are the message sizes in bytes; None: the default sizes of the device."""
    sizes = sizes or (CARD_SIZES if is_card(ctx.device) else CPU_SIZES)
    for member in groups_of(ctx):
        for name in OPERATIONS if member.title == "ep" else list(OPERATIONS)[:-1]:
            announce(f"{name} of the {member.title} group {list(member.ranks)}")
            yield examine_operation(member, name, sizes)


def examine_operation(member: Member, name: str, sizes: Sequence[int]) -> Row:
    """Test one collective in one process group: its result in every data type, and its speed in float32 for
    each message size."""
    run, expect = OPERATIONS[name]
    title, speeds, problems, numbers = f"{name} ({member.title})", [], [], {}
    for dtype, size in (*((dtype, sizes[0]) for dtype in _TYPES), *(("float32", size) for size in sizes)):
        count = max(1, size // _ITEM_BYTES // member.size) * (1 if name == "all_gather" else member.size)
        inputs = inputs_of(count, member.size)
        mine = paddle.to_tensor(inputs[member.place]).astype(dtype)
        problem = _problem(run(member, mine), expect(member, inputs), dtype)
        # Go on after a wrong result, because the other members of the group would wait.
        problems += [f"{dtype}, {bytes_text(size)}: {problem}"] if problem else []
        if dtype == "float32":
            speed = size / _seconds(lambda mine=mine: run(member, mine))
            speeds.append(f"{bytes_text(size)} at {bytes_text(speed)}/s")
            numbers[f"bytes_per_second_{size}"] = speed
    if problems:
        return fail(title, f"group {list(member.ranks)}, {problems[0]}", _FIX)
    return ok(title, ", ".join(speeds), **numbers)


def _problem(result: paddle.Tensor, expected: np.ndarray, dtype: str) -> str:
    found = result.astype("float32").numpy()
    wrong = ~np.isclose(found, expected, rtol=_ROUNDING.get(dtype, 0.0), atol=0.0)
    if not wrong.any():
        return ""
    first = int(np.argmax(wrong))
    text = f"{int(wrong.sum())} of {wrong.size} numbers are wrong"
    return f"{text}; number {first} is {found[first]:g} and not {expected[first]:g}"


def _seconds(run: Callable[[], paddle.Tensor]) -> float:
    _wait()
    begin = time.perf_counter()
    for _ in range(_TIMES):
        run()
    _wait()
    return (time.perf_counter() - begin) / _TIMES


def _wait() -> None:
    if on_card():
        paddle.device.synchronize()
