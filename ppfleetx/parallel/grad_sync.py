"""Gradients of one process to gradients of the whole job: once per step, after the last micro batch.

The one owner of every reduction of gradients. The loss each rank differentiates is already divided by
the job's number of valid tokens, so everything here is a plain sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from ppfleetx.distributed.collectives import all_reduce_packed, reduce_packed
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.optims.grad_clip import clip_by_global_norm

Owners = Mapping[str, int]
"""Canonical name -> sharding rank that holds the parameter's optimizer state."""


class GradientSync:
    """Sums and clips the gradients of ``parameters``.

    Args:
        parameters: trainable parameters of this rank, each once, in model order.
        ctx: this process's place.
        tied_group: pipeline ranks that hold copies of the tied parameters, when this rank is one of them.
        tied_names: canonical names of the tied parameters.
        owners: who updates which parameter under sharding; None: every rank updates all.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        ctx: ParallelContext,
        *,
        tied_group: Any = None,
        tied_names: Sequence[str] = (),
        owners: Owners | None = None,
    ) -> None:
        self._parameters, self._ctx, self._owners = list(parameters), ctx, owners
        self._tied_group = tied_group
        self._tied = [p for p in self._parameters if tied_group is not None and p.info.name in tied_names]
        self._is_tied_copy = tied_group is not None and tied_group.rank != 0

    def reduce(self) -> None:
        """Complete the gradients: over the sequence, over tied copies, over replicas, in this order."""
        ctx = self._ctx
        partial = [p for p in self._parameters if getattr(p, "sequence_parallel", False)]
        if partial:
            all_reduce_packed(_gradients(partial), ctx.group_of("mp"))
        if self._tied:
            all_reduce_packed(_gradients(self._tied), self._tied_group)
        mine = self._parameters
        if self._owners is not None:
            mine = self._reduce_to_owners()
        for axis in ("sep", "dp"):
            if ctx.size_of(axis) > 1:
                all_reduce_packed(_gradients(mine), ctx.group_of(axis))

    def clip(self, max_norm: float) -> float:
        """Clip by the norm of the whole model's gradient, each parameter counted once; give that norm."""
        counted = [p for p in self._parameters if self._counts(p)]
        return clip_by_global_norm(
            self._parameters,
            max_norm,
            reduce=lambda total: self._ctx.sum_tensor_over(("mp", "pp", "sharding"), total),
            counted=counted,
        )

    def _reduce_to_owners(self) -> list[paddle.Tensor]:
        """Sum over the sharding group into each parameter's owner; give the parameters owned here."""
        group = self._ctx.group_of("sharding")
        for owner in range(group.nranks):
            owned = [p for p in self._parameters if self._owners[p.info.name] == owner]
            if owned:
                reduce_packed(_gradients(owned), group, owner)
        return [p for p in self._parameters if self._owners[p.info.name] == group.rank]

    def _counts(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank is the one that adds the parameter to the norm.

        Of replicas along dp and sep every rank has the same sum, so nothing is added over those axes.
        """
        info, ctx = parameter.info, self._ctx
        if info.is_whole and ctx.rank_on("mp") != 0:
            return False
        if self._is_tied_copy and any(parameter is tied for tied in self._tied):
            return False
        if self._owners is not None:
            return self._owners[info.name] == ctx.rank_on("sharding")
        return ctx.rank_on("sharding") == 0


def _gradients(parameters: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
