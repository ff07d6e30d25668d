"""Gradients of one process to gradients of the whole job: once per step, after the last micro batch.

The one owner of every reduction of gradients. The loss each rank differentiates is already divided by
the job's number of valid tokens, so everything here is a plain sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import paddle

from ppfleetx.distributed.collectives import all_reduce_packed
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.optims.grad_clip import clip_by_global_norm, squared_norm
from ppfleetx.optims.gradients import gradient_of

if TYPE_CHECKING:
    from ppfleetx.parallel.sharding import Sharding


class GradientSync:
    """Sums and clips the gradients of ``parameters``.

    Args:
        parameters: trainable parameters of this rank, each once, in model order.
        ctx: this process's place.
        tied_group: pipeline ranks that hold copies of the tied parameters, when this rank is one of them.
        tied_names: canonical names of the tied parameters.
        sharding: gives each parameter an owner, who alone needs its gradient; None: every rank does.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        ctx: ParallelContext,
        *,
        tied_group: Any = None,
        tied_names: Sequence[str] = (),
        sharding: Sharding | None = None,
    ) -> None:
        self.parameters, self._ctx, self._sharding = list(parameters), ctx, sharding
        self._tied_group, self._tied_names = tied_group, frozenset(tied_names)

    def reduce(self) -> None:
        """Complete the gradients: into the owners, over parts of the sequence, tied copies, replicas."""
        ctx, mine = self._ctx, self.parameters
        if self._sharding is not None:
            mine = self._sharding.finish_gradients()
        partial = [p for p in mine if getattr(p, "sequence_parallel", False)]
        if partial:
            all_reduce_packed(_gradients(partial), ctx.group_of("mp"))
        tied = [p for p in mine if self._is_tied(p)]
        if tied:
            all_reduce_packed(_gradients(tied), self._tied_group)
        for axis in ("sep", "dp"):
            if ctx.size_of(axis) > 1:
                all_reduce_packed(_gradients(mine), ctx.group_of(axis))

    def clip(self, max_norm: float) -> float:
        """Clip by the norm of the whole model's gradient, each parameter counted once; give that norm."""
        counted = [p for p in self.parameters if self.counts(p)]
        return clip_by_global_norm(
            self.parameters,
            max_norm,
            reduce=lambda total: self._ctx.sum_tensor_over(("mp", "pp", "sharding"), total),
            counted=counted,
        )

    def uncounted_are_finite(self) -> bool:
        """Whether the gradients held here that :meth:`clip` leaves to other ranks to count are finite."""
        others = [p for p in self.parameters if not self.counts(p)]
        return math.isfinite(squared_norm(others).item())

    def _is_tied(self, parameter: paddle.Tensor) -> bool:
        return self._tied_group is not None and parameter.info.name in self._tied_names

    def counts(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank is the one, of those along mp, pp and sharding, that counts the parameter.

        Of replicas along dp and sep each counts it: nothing is summed over those axes.
        """
        info, ctx = parameter.info, self._ctx
        if info.is_whole and ctx.rank_on("mp") != 0:
            return False
        if self._is_tied(parameter) and self._tied_group.rank != 0:
            return False
        return self._sharding is None or self._sharding.owns(parameter)


def _gradients(parameters: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
    found = [gradient_of(parameter) for parameter in parameters]
    return [gradient for gradient in found if gradient is not None]
