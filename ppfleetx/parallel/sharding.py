"""Optimizer states divided over the sharding ranks (ZeRO, Rajbhandari et al., 2020)."""

from __future__ import annotations

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.optims.adamw import Optimizer


def shard_optimizer(optimizer: Optimizer, ctx: ParallelContext) -> dict[str, int]:
    """Let fleet's stage 1 optimizer do the steps: whole parameters are dealt out to the sharding ranks.

    Returns:
        Canonical name -> sharding rank that updates the parameter and sends it to the others.
    """
    from paddle.distributed import fleet
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import DygraphShardingOptimizer

    named = optimizer.named_params
    optimizer.wrap(lambda inner: DygraphShardingOptimizer(inner, fleet.get_hybrid_communicate_group()))
    ranks = optimizer.stepper._param2rank
    owners = {name: ranks[parameter.name] for name, parameter in named}
    here = ctx.rank_on("sharding")
    optimizer.named_params = [(name, parameter) for name, parameter in named if owners[name] == here]
    return owners
