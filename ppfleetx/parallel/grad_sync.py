"""Make the gradients of each process those of the whole job, once per step, after the last micro batch.

The one owner of every reduction of gradients. The loss each rank differentiates is already divided by
the job's number of valid tokens, so everything here is a plain sum.

Copies of a parameter must get the same update to the last bit, and nothing but their gradients' bits can
make them. On a GPU two ranks that compute the same may differ in the last bit (kernels that add by
atomics), and so may two groups that add the same numbers (NCCL's order depends on where the ranks are).
Hence the order here: sums over one group at a time, what is held whole by tensor-parallel ranks made
equal at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import paddle
from paddle import distributed

from ppfleetx.distributed.collectives import all_reduce_packed, equalize_packed
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.fused import NO_FUSED_OPS, FusedOps
from ppfleetx.optims.grad_clip import global_norm, scale_to_norm
from ppfleetx.optims.gradients import gradient_of
from ppfleetx.parallel.overlap import BUCKETS_IN_SIZE, Bucket, BucketSums, cut

if TYPE_CHECKING:
    from ppfleetx.parallel.sharding import Sharding, Values


class GradientSync:
    """Sums and clips the gradients of ``parameters``.

    Args:
        parameters: trainable parameters of this rank, each once, in model order.
        ctx: this process's place.
        tied_group: pipeline ranks that hold copies of the tied parameters, when this rank is one of them.
        tied_names: canonical names of the tied parameters.
        sharding: gives each parameter an owner, who alone needs its gradient; None: every rank does.
        values: brings the owners' values, with sharding.
        bucket_bytes: send sums of about this size while the backward pass runs; None: all at its end.
        ops: fused operators to measure and clip with.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        ctx: ParallelContext,
        *,
        tied_group: Any = None,
        tied_names: Sequence[str] = (),
        sharding: Sharding | None = None,
        values: Values | None = None,
        bucket_bytes: int | None = None,
        ops: FusedOps = NO_FUSED_OPS,
    ) -> None:
        self.ops = ops
        self.parameters, self._ctx, self._sharding = list(parameters), ctx, sharding
        self._tied_group, self._tied_names = tied_group, frozenset(tied_names)
        self._values = values
        self._early: set[int] = set()  # parameters that are summed over the replicas during the backward pass
        self._sums = None if bucket_bytes is None else self._bucket_sums(bucket_bytes)

    def _bucket_sums(self, nbytes: int) -> BucketSums | None:
        """The sums that need not wait for the end: into the owners, or over the replicas.

        What is to be summed over the tensor-parallel ranks before that is small, and waits.
        """
        if self._sharding is not None:
            return self._sharding.bucket_sums(nbytes)
        group = replica_group(self._ctx)
        if group is None:
            return None
        early = [p for p in reversed(self.parameters) if not getattr(p, "partial_gradient", False)]
        self._early = {id(parameter) for parameter in early}
        start = partial(distributed.all_reduce, group=group, sync_op=False)
        return BucketSums([Bucket(bucket, start) for _, bucket in cut(early, nbytes // BUCKETS_IN_SIZE)])

    def begin(self, num_micro_batches: int) -> None:
        """Before the passes of a step: how many backward passes its gradients come from."""
        if self._sums is not None:
            self._sums.begin(num_micro_batches)

    def reduce(self) -> None:
        """Complete the gradients: into the owners, over parts of the sequence, replicas, tied copies."""
        ctx, mine = self._ctx, self.parameters
        if self._sums is not None:
            self._sums.finish()
        if self._sharding is not None:
            mine = self._sharding.finish_gradients()
        partial = [p for p in mine if getattr(p, "partial_gradient", False)]
        if partial:
            all_reduce_packed(_gradients(partial), ctx.group_of("mp"))
        replicas = replica_group(ctx)
        if replicas is not None:
            all_reduce_packed(_gradients([p for p in mine if id(p) not in self._early]), replicas)
        # After the replicas: a sum of two numbers has one order, so the copies stay equal along them too.
        tied = [p for p in mine if self._is_tied(p)]
        if tied:
            all_reduce_packed(_gradients(tied), self._tied_group)
        if ctx.size_of("mp") > 1:
            equalize_packed(_gradients([p for p in mine if p.info.is_whole]), ctx.group_of("mp"))

    def norm(self) -> paddle.Tensor:
        """Norm of the whole model's gradient, each parameter counted once: float64, still on the device."""
        counted = [p for p in self.parameters if self.counts(p)]
        reduce = partial(self._ctx.sum_tensor_over, ("mp", "pp", "sharding"))
        return global_norm(counted, reduce, self.ops)

    def clip(self, norm: float, max_norm: float) -> None:
        """Clip by the norm, which is :meth:`norm`, read."""
        scale_to_norm(self.parameters, norm, max_norm, self.ops)

    def finish_values(self) -> None:
        """Wait for values of the last update that are still on their way, before parameters are read."""
        if self._values is not None:
            self._values.finish()

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


def replica_group(ctx: ParallelContext) -> Any:
    """The ranks over which the gradient of every parameter is summed; None when this rank is alone.

    Replicas and parts of the sequence together, in the one group that fleet has for both: after two sums,
    one behind the other, their ranks would hold what was added in two orders.
    """
    if ctx.size_of("sep") == 1:
        return ctx.group_of("dp") if ctx.size_of("dp") > 1 else None
    if ctx.size_of("dp") == 1:
        return ctx.group_of("sep")
    from paddle.distributed import fleet

    return fleet.get_hybrid_communicate_group().get_dp_sep_parallel_group()


def _gradients(parameters: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
    found = [gradient_of(parameter) for parameter in parameters]
    return [gradient for gradient in found if gradient is not None]
