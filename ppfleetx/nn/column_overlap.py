"""Column-parallel layers that overlap the all-reduce of the input's gradient with the weight's gradient.

Each rank multiplies the whole input by its columns of the weight, so the gradient of the input is a sum over
the ranks. Earlier layers need this sum, and nothing needs the gradient of the weight yet. So the sum is
started first, and awaited after the weight's gradient (Narayanan et al. 2021, and Korthikanti et al. 2022,
section 4.2.2, for sequences). One sum runs at a time, at a fixed point of the program, so all ranks of a
group start their sums in the same order.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import distributed

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.matmul import Exchange, Finish


class WholeInput:
    """:class:`~ppfleetx.nn.matmul.Exchange` for ranks that all hold the whole input."""

    gathers_again = False

    def __init__(self, group: Any) -> None:
        self._group = group

    def whole(self, x: paddle.Tensor) -> paddle.Tensor:
        return x

    def start_whole(self, x: paddle.Tensor) -> Finish:
        return lambda: x

    def start_sum(self, gradient: paddle.Tensor) -> Finish:
        task = distributed.all_reduce(gradient, group=self._group, sync_op=False)
        return _finish(task, gradient)


class ScatteredInput:
    """:class:`~ppfleetx.nn.matmul.Exchange` for ranks that each hold some positions of the input.

    Args:
        group: the ranks.
        gathers_again: whether the backward pass gathers the input again while it computes the input's
            gradient.
    """

    def __init__(self, group: Any, *, gathers_again: bool) -> None:
        self._group, self.gathers_again = group, gathers_again

    def whole(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.start_whole(x)()

    def start_whole(self, x: paddle.Tensor) -> Finish:
        gathered = paddle.empty([x.shape[0] * self._group.nranks, *x.shape[1:]], x.dtype)
        task = distributed.stream.all_gather(gathered, x.detach(), group=self._group, sync_op=False)
        return _finish(task, gathered)

    def start_sum(self, gradient: paddle.Tensor) -> Finish:
        part = paddle.empty([gradient.shape[0] // self._group.nranks, *gradient.shape[1:]], gradient.dtype)
        task = distributed.stream.reduce_scatter(part, gradient, group=self._group, sync_op=False)
        return _finish(task, part, gradient)


def _finish(task: Any, result: paddle.Tensor, *_used: paddle.Tensor) -> Finish:
    """A function that waits for ``task`` and keeps its tensors alive until then."""

    def finish(_held: tuple[paddle.Tensor, ...] = _used) -> paddle.Tensor:
        task.wait()
        return result

    return finish


def column_exchange(ctx: ParallelContext, *, gathers_again: bool) -> Exchange:
    """The :class:`~ppfleetx.nn.matmul.Exchange` of a plan with tensor parallelism, or None."""
    group = ctx.group_of("mp")
    if ctx.plan.sequence_parallel:
        return ScatteredInput(group, gathers_again=gathers_again)
    return WholeInput(group)
