"""Sum the gradients of all ranks, once per step. The sums are the gradients of the whole job, because the
loss of each rank is already divided by the job's number of valid tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import paddle
from paddle import distributed

from ppfleetx.config.mesh import DENSE, EXPERT_AXES, EXPERTS
from ppfleetx.distributed.collectives import all_reduce_packed, equalize_packed
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather
from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps
from ppfleetx.nn.param_spec import (
    Axes,
    ParamSpec,
    counts_in_norm,
    gradient_sums,
    groups_needed,
    in_order,
    kept_equal_over,
    may_lack_gradient,
    norm_axes,
    writes_to_checkpoint,
)
from ppfleetx.optims.gradients import complete_gradient, is_in_use, scale_to_norm, squared_norm
from ppfleetx.parallel.grad_buckets import BUCKETS_IN_SIZE, Bucket, BucketSums, cut

if TYPE_CHECKING:
    from ppfleetx.parallel.param_broadcast import ParamBroadcast
    from ppfleetx.parallel.sharding import Sharding
    from ppfleetx.parallel.zero3 import ParameterSharding


class GradientSync:
    """Reduces the gradients of ``parameters`` over the job, and clips them.

    Args:
        parameters: this rank's trainable parameters without duplicates, in model order.
        ctx: this process's rank and coordinates, with the process groups of the whole model.
        tied_group: process group of the pipeline ranks with copies of the tied parameters; None on other
            ranks.
        has_experts: whether any rank has parameters of experts.
        sharding: reduces the gradient of each parameter to its owner; None: all ranks get all gradients.
        values: sends parameter values from their owners; None without sharding.
        bucket_bytes: approximate size of the reductions that overlap the backward pass; None: no overlap.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        ctx: ParallelContext,
        *,
        tied_group: Any = None,
        has_experts: bool = False,
        sharding: Sharding | None = None,
        values: ParamBroadcast | ParameterSharding | None = None,
        bucket_bytes: int | None = None,
        ops: FusedOps = NO_FUSED_OPS,
    ) -> None:
        self.ops = ops
        self.parameters, self._ctx, self._sharding = list(parameters), ctx, sharding
        self._tied_group, self._values = tied_group, values
        self._mine = [p for p in self.parameters if sharding is None or sharding.owns(p)]
        self._counted = {
            view: [p for p in self._mine if p.spec.view == view and self._is_responsible(counts_in_norm, p)]
            for view in ((DENSE, EXPERTS) if has_experts else (DENSE,))
        }
        self._early: set[int] = set()  # ids of parameters whose gradients are summed in the backward pass
        self._sums = None if bucket_bytes is None else self._bucket_sums(bucket_bytes)
        mesh = ctx.mesh
        # Copies of a parameter need bitwise equal gradients, but ranks or groups that compute the same sum on
        # GPUs can get different last bits. Therefore sums run over one group at a time, in the order of
        # nn/param_spec.py, and gradients that tensor-parallel ranks share are made equal at the end.
        self._rounds = self._grouped(lambda p: self._sums_of(p)[int(id(p) in self._early) :])
        self._equal = self._grouped(lambda p: [axes for axes in [kept_equal_over(p.spec, mesh)] if axes])

    def _sums_of(self, parameter: paddle.Tensor) -> tuple[Axes, ...]:
        sums = gradient_sums(parameter.spec, self._ctx.mesh)
        return sums if self._tied_group is not None else tuple(axes for axes in sums if axes != ("pp",))

    def _grouped(
        self, axes_of: Callable[[paddle.Tensor], Sequence[Axes]]
    ) -> list[tuple[Any, list[paddle.Tensor]]]:
        """Group this rank's parameters by process group. Returns (process group, parameters) pairs in the
        order in which the collectives run. ``axes_of`` returns the process groups of a parameter, each as a
        tuple of axes, such as ``("dp", "sep")``."""
        found = {id(p): axes_of(p) for p in self._mine}
        return [
            (
                self._tied_group if axes == ("pp",) else self._ctx.group_over(axes),
                [p for p in self._mine if axes in found[id(p)]],
            )
            for axes in in_order(axes for several in found.values() for axes in several)
        ]

    def _bucket_sums(self, nbytes: int) -> BucketSums | None:
        """Build the all-reduces of gradients that overlap the backward pass. Returns None with sharding, or
        if the axes ``dp`` and ``sep`` both have size 1."""
        if self._sharding is not None:
            return None  # `Sharding` reduces gradients to their owners
        replicas = tuple(axis for axis in DENSE.replicas if self._ctx.size_of(axis) > 1)
        if not replicas:
            return None
        # Leave out gradients that must first be summed over tensor-parallel ranks.
        early = [p for p in reversed(self.parameters) if self._sums_of(p)[:1] == (replicas,)]
        early = [p for p in early if not may_lack_gradient(p.spec)]  # experts may get no tokens
        self._early = {id(parameter) for parameter in early}
        start = partial(distributed.all_reduce, group=self._ctx.group_over(replicas), sync_op=False)
        return BucketSums([Bucket(bucket, start) for _, bucket in cut(early, nbytes // BUCKETS_IN_SIZE)])

    def begin(self, num_micro_batches: int) -> None:
        for sums in (self._sums, self._sharding):
            if sums is not None:
                sums.begin(num_micro_batches)

    def reduce(self) -> None:
        """Finish the gradient reduction after the backward passes. Each parameter then has the gradient of
        the whole job; with sharding, only on the rank that owns the parameter."""
        if self._sums is not None:
            self._sums.finish()
        if self._sharding is not None:
            self._sharding.finish_gradients()
        _gradients(self._mine)
        for group, members in self._rounds:
            all_reduce_packed(_gradients(members), group)
        for group, members in self._equal:
            equalize_packed(_gradients(members), group)

    def norm(self) -> paddle.Tensor:
        """Return the gradient norm of the whole model as a float64 scalar on the device. A parameter that
        several ranks hold counts once."""
        mesh = self._ctx.mesh
        squares = [
            self._ctx.sum_tensor_over(norm_axes(view, mesh), squared_norm(counted, self.ops))
            for view, counted in self._counted.items()
        ]
        return (squares[0] if len(squares) == 1 else paddle.add_n(squares)).sqrt()

    def clip(self, norm: float, max_norm: float) -> None:
        scale_to_norm(self.parameters, norm, max_norm, self.ops)

    def finish_values(self) -> None:
        if self._values is not None:
            self._values.finish()

    def writes(self, parameter: paddle.Tensor) -> bool:
        """Return whether this rank writes its slice of the parameter into a checkpoint."""
        return self._is_responsible(writes_to_checkpoint, parameter)

    def _is_responsible(self, is_first_copy: Callable[..., bool], parameter: paddle.Tensor) -> bool:
        """Return the result of ``is_first_copy`` for the parameter and this rank, but False if another rank
        owns the parameter or an earlier pipeline stage holds a tied copy. ``is_first_copy`` is
        :func:`counts_in_norm` or :func:`writes_to_checkpoint` of :mod:`ppfleetx.nn.param_spec`."""
        is_copy = parameter.spec.tie is not None and self._tied_group is not None
        owns = self._sharding is None or self._sharding.owns(parameter)
        is_first_tied = not is_copy or self._tied_group.rank == 0
        return owns and is_first_tied and is_first_copy(parameter.spec, self._ctx.mesh, self._ctx.rank)


def _gradients(parameters: Iterable[paddle.Tensor]) -> list[paddle.Tensor]:
    """Return the gradients of the ``parameters`` that are in use (:func:`is_in_use`). A gradient is zero if
    no backward pass has produced it."""
    return [complete_gradient(parameter) for parameter in parameters if is_in_use(parameter)]


def with_model_groups(specs: Iterable[ParamSpec], ctx: ParallelContext) -> tuple[ParallelContext, bool]:
    """Create the process groups that the model's parameters need. All ranks must call this. Returns ``ctx``
    with these groups, and whether the model has experts."""
    needed = groups_needed(specs, ctx.mesh)
    if ctx.size_of("pp") > 1:
        needed = sorted({tuple(axes) for of_rank in gather(ctx, needed) for axes in of_rank})
    return ctx.with_groups(needed), any(axes[0] in EXPERT_AXES for axes in needed)
