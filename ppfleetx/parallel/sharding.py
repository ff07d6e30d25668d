"""States, gradients and parameters divided over the sharding ranks (ZeRO, Rajbhandari et al., 2020).

Whole parameters are dealt out: each has one owner among the ranks that share it. Stage 1: only the owner
keeps optimizer states and updates, then sends the result (``new_values.py``). Stage 2: gradients leave for
their owners during the backward pass. Stage 3: the owner alone keeps the values between uses; a stage of the
model gets what it needs just before its forward and its backward pass (``sharded_values.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import paddle
from paddle import distributed

from ppfleetx.distributed.collectives import BUCKET_BYTES, move_together, reduce_packed
from ppfleetx.nn.param_spec import Axes, may_miss, owner_axes
from ppfleetx.optims.gradients import (
    add_gradient,
    complete_gradient,
    drop_gradient,
    expects_gradient,
    take_gradient,
)
from ppfleetx.parallel.overlap import BUCKETS_IN_SIZE, Bucket, BucketSums, cut

if TYPE_CHECKING:
    from ppfleetx.distributed.context import ParallelContext

UNWAITED_MESSAGES = 2
"""Of stages 2 and 3, that have left and have not been waited for: those to two owners go in both directions
of a link. More would keep gradients whose memory these stages are to save."""


def deal_out(sizes: Mapping[str, int], num_ranks: int, first: Iterable[str] = ()) -> dict[str, int]:
    """An owner for each parameter, by name: the largest first, each to the rank that has least so far.

    Those named in ``first`` go to rank 0.
    """
    owners, load = dict.fromkeys((name for name in first if name in sizes), 0), [0] * num_ranks
    load[0] = sum(sizes[name] for name in owners)
    for name, size in sorted(sizes.items(), key=lambda item: item[1], reverse=True):
        if name not in owners:
            rank = load.index(min(load))
            owners[name] = rank
            load[rank] += size
    return owners


class Values(Protocol):
    """How the values of parameters come from their owners."""

    def updated(self) -> None:
        """The owners have new values."""

    def finish(self) -> None:
        """Wait until nothing is under way."""


class Sharding:
    """What sharding does to a model's parameters and their gradients.

    Args:
        parameters: trainable parameters of this rank, each once.
        ctx: this process's place, with the groups of owners.
        stage: 1, 2 or 3.
        frozen: the others, which have no gradients and states, but values to hold (stage 3) and to save.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        ctx: ParallelContext,
        stage: int,
        frozen: Sequence[paddle.Tensor] = (),
    ) -> None:
        self._parameters, self._ctx, self._stage = list(parameters), ctx, stage
        both = [*frozen, *parameters]
        self._axes_of = {p.info.name: owner_axes(p.spec, ctx.mesh) for p in both}
        self._group_of = {name: ctx.group_over(axes) for name, axes in self._axes_of.items()}
        # Apart, so that both states and values are shared evenly.
        self.owners = {**self._deal_out(frozen), **self._deal_out(parameters)}
        # By owner and type, since what travels together is of one type; the same keys in the same order on
        # every rank.
        self._pending: dict[tuple[Axes, int, Any], dict[str, paddle.Tensor]] = {}
        types = dict.fromkeys(parameter.dtype for parameter in self._parameters)
        for axes in dict.fromkeys(axes for p in self._parameters if (axes := self._axes(p))):
            for rank in range(ctx.group_over(axes).nranks):
                self._pending |= {(axes, rank, dtype): {} for dtype in types}
        self._bucket_bytes = BUCKET_BYTES
        self._overlaps = False
        self._under_way: deque[tuple[Any, list[paddle.Tensor], list[paddle.Tensor]]] = deque()
        # During the passes leaves what every pass gives; the rest at the end of a step.
        self._at_once = [p for p in self._parameters if stage > 1 and not may_miss(p.spec)]
        for parameter in self._at_once:
            parameter._register_backward_hook(lambda *_, p=parameter: self._on_gradient(p))

    def _axes(self, parameter: paddle.Tensor) -> Axes:
        return self._axes_of[parameter.info.name]

    def _deal_out(self, parameters: Sequence[paddle.Tensor]) -> dict[str, int]:
        """Owners: one deal for each group of ranks. Of tied parameters, which other pipeline ranks have too,
        the first rank is the owner: the same on all of them."""
        sizes: dict[Axes, dict[str, int]] = {}
        for parameter in parameters:
            sizes.setdefault(self._axes(parameter), {})[parameter.info.name] = parameter.size
        has_copies = self._ctx.size_of("pp") > 1
        tied = [p.info.name for p in parameters if has_copies and p.spec.tie is not None]
        owners: dict[str, int] = {}
        for axes, named in sizes.items():
            owners |= deal_out(named, self._ctx.group_over(axes).nranks if axes else 1, tied)
        return owners

    def group_of(self, parameter: paddle.Tensor) -> Any:
        """The ranks that share the parameter, of which one is its owner; None: this rank alone has it."""
        return self._group_of[parameter.info.name]

    def owner_of(self, parameter: paddle.Tensor) -> int:
        """Rank of the parameter's owner in its group."""
        return self.owners[parameter.info.name]

    def owns(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank is the parameter's owner."""
        group = self.group_of(parameter)
        return group is None or self.owner_of(parameter) == group.rank

    def holds(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank has the parameter's value between its uses."""
        return self._stage < 3 or self.owns(parameter)

    def bucket_sums(self, nbytes: int) -> BucketSums | None:
        """Let gradients travel while the backward pass goes on, in messages of about ``nbytes``.

        Returns:
            Of stage 1, whose gradients leave once a step, the sums to begin and to finish in each step.
        """
        self._bucket_bytes, self._overlaps = nbytes, True
        if self._stage > 1:
            return None
        self._at_once = [p for p in self._parameters if self._axes(p) and not may_miss(p.spec)]
        place = lambda p: (self._axes(p), self.owner_of(p))  # noqa: E731
        buckets = cut(list(reversed(self._at_once)), nbytes // BUCKETS_IN_SIZE, place)
        return BucketSums(
            [Bucket(bucket, self._start(*to), partial(self._drop, bucket)) for to, bucket in buckets]
        )

    def _start(self, axes: Axes, owner: int) -> Callable[[paddle.Tensor], Any]:
        group = self._ctx.group_over(axes)
        return lambda flat: distributed.reduce(flat, group.ranks[owner], group=group, sync_op=False)

    def _drop(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Forget gradients that have been summed into another rank."""
        for parameter in parameters:
            if not self.owns(parameter):
                drop_gradient(parameter)

    def finish_gradients(self) -> None:
        """Complete the owners' sums; only parameters that are owned here have gradients then."""
        sent = {id(parameter) for parameter in self._at_once}
        for parameter in self._parameters:
            if id(parameter) not in sent and self._axes(parameter):
                self._pending_with(parameter)[parameter.info.name] = parameter
        for place in self._pending:
            self._send(place)
        while self._under_way:
            self._complete()
        if self._stage == 3:
            # The first layer's input carries no gradient that could tell when its backward pass is over.
            for parameter in self._parameters:
                if not self.owns(parameter) and parameter._is_initialized():
                    parameter._clear_data()

    def _on_gradient(self, parameter: paddle.Tensor) -> None:
        """A backward pass has added to the gradient: send it when enough has come together."""
        pending = self._pending_with(parameter)
        pending[parameter.info.name] = parameter
        if sum(p.size * p.element_size() for p in pending.values()) >= self._bucket_bytes:
            self._send(self._place(parameter))

    def _place(self, parameter: paddle.Tensor) -> tuple[Axes, int, Any]:
        return self._axes(parameter), self.owner_of(parameter), parameter.dtype

    def _pending_with(self, parameter: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """What travels together with the parameter's gradient."""
        return self._pending[self._place(parameter)]

    def _send(self, place: tuple[Axes, int, Any]) -> None:
        """Sum pending gradients into the owner, who keeps the sum and adds to it in the next pass."""
        axes, owner, _ = place
        parameters = [p for p in self._pending[place].values() if expects_gradient(p)]
        self._pending[place] = {}
        if not parameters:
            return
        if not self._overlaps:
            group = self._ctx.group_over(axes)
            reduce_packed([complete_gradient(p) for p in parameters], group, owner)
            self._drop(parameters)
            return
        while len(self._under_way) == UNWAITED_MESSAGES or self._is_under_way(parameters):
            self._complete()
        gradients = [take_gradient(p) for p in parameters]
        task = self._start(axes, owner)(move_together(gradients))
        self._under_way.append((task, parameters, gradients))

    def _is_under_way(self, parameters: Sequence[paddle.Tensor]) -> bool:
        """Whether a gradient of an earlier micro batch is. Sums are then added in the order of the passes."""
        travelling = {id(p) for _, others, _ in self._under_way for p in others}
        return any(id(p) in travelling for p in parameters)

    def _complete(self) -> None:
        """Wait for the oldest; its owner adds it to what passes have given since."""
        task, parameters, gradients = self._under_way.popleft()
        task.wait()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if self.owns(parameter):
                add_gradient(parameter, gradient)
