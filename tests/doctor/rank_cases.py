"""What ranks of a pool run for the tests of doctor (tests/helpers/ranks.py calls these by name)."""

from __future__ import annotations

from typing import Any
from unittest import mock


def collectives(mp: int, fault: int | None = None) -> list[dict[str, Any]]:
    """Rows of all operations in the groups of a plan; the rank ``fault`` adds one to what it has summed."""
    from paddle import distributed

    from ppfleetx.config.sections.moe import MoEConfig
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.doctor.check import Target
    from ppfleetx.doctor.collectives import examine_groups
    from ppfleetx.doctor.run import plan_config

    size = distributed.ParallelEnv().world_size
    cfg = plan_config(Target(world_size=size))
    cfg = cfg.changed("Distributed", mp_degree=mp, dp_degree=size // mp, ep_degree=size // mp)
    cfg = cfg.changed("Model", moe=MoEConfig(num_experts=size))
    ctx = init_distributed(cfg)
    right = distributed.all_reduce

    def wrong(tensor: Any, *arguments: Any, **options: Any) -> Any:
        task = right(tensor, *arguments, **options)
        tensor[0] += 1
        return task

    with mock.patch.object(distributed, "all_reduce", wrong if ctx.rank == fault else right):
        return [row.as_json() for row in examine_groups(ctx, lambda what: None, (256, 4096))]
