"""Set up a process of a training job: choose its device, seed its random generators, connect it to the other
processes through Paddle's fleet, and create its :class:`ParallelContext`."""

from __future__ import annotations

from functools import partial
from typing import Any

import paddle

from ppfleetx.config.batch_sizes import BatchPlan
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.mesh import SMALL_MESSAGE
from ppfleetx.config.parallel_plan import AXES, ParallelPlan
from ppfleetx.config.rules import expert_message_bytes
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import ranks_per_node
from ppfleetx.distributed.device import choose_device, is_card, name_errors, place, select_card_for_thread
from ppfleetx.distributed.random import register_sliced_stream, seed_everything
from ppfleetx.resilience.flight_recorder import OPERATIONS, RECORD


def init_distributed(cfg: RunConfig) -> ParallelContext:
    """Set Paddle's device, flags and seeds for a run, and connect to the other processes of the job. Returns
    this process's context. Raises ConfigError if ``Global.device`` cannot be used, or if Paddle does not
    accept ``Global.flags``."""
    device = choose_device(cfg.Global.device, cfg.origins.get("Global.device"))
    name_errors(device)
    _set_flags(cfg)
    paddle.set_device(device)
    if cfg.plan.world_size == 1:
        ctx = ParallelContext.single(device)
    else:
        ctx = start_fleet(cfg.plan, cfg.batch, device)
        if cfg.Model.moe is not None:
            ctx = ctx.with_groups([("ep",), ("emp",)])
            if (
                cfg.plan.ep > 1
                and expert_message_bytes(cfg) < SMALL_MESSAGE
                and (size := ranks_per_node(ctx))
            ):
                ctx = ctx.with_levels("ep", size)
    seed_everything(cfg.Global.seed)
    if cfg.plan.mp > 1:
        register_sliced_stream(cfg.Global.seed)
    return ctx


# Original values of the Paddle flags that the latest run in this process has changed.
_flags_before: dict[str, Any] = {}


def _set_flags(cfg: RunConfig) -> None:
    paddle.set_flags(_flags_before)
    _flags_before.clear()
    for name, value in cfg.Global.flags.items():
        try:
            before = paddle.get_flags(name)
            paddle.set_flags({name: value})
            _flags_before.update(before)
        except (ValueError, RuntimeError, TypeError) as error:
            unknown = isinstance(error, ValueError)
            key = f"Global.flags.{name}"
            raise ConfigError(
                "Paddle has no such flag that a program may set" if unknown else "Paddle does not take it",
                key=key,
                value=value,
                place=cfg.origins.get(key),
            ) from error


def flags_of_run() -> dict[str, Any]:
    """Return the current values of the Paddle flags that ``Global.flags`` of the configuration sets."""
    return paddle.get_flags(list(_flags_before)) if _flags_before else {}


def start_fleet(plan: ParallelPlan, batch: BatchPlan, device: str) -> ParallelContext:
    """Call ``fleet.init`` with the parallel degrees of ``plan``, and return this process's context. Raises
    ConfigError if ``device`` is a CPU and Paddle is a CUDA build."""
    from paddle.distributed import fleet

    if not is_card(device):
        from ppfleetx.distributed.cpu import backend as cpu_backend

        if not cpu_backend.install():
            raise ConfigError(
                "several processes on the CPU need Paddle's CPU build; this is the CUDA build",
                key="Global.device",
                value=device,
            )
    else:
        RECORD.record_class(paddle.base.core.ProcessGroup, OPERATIONS)
        RECORD.select_card_for_thread = partial(select_card_for_thread, place())
    # Reset fleet's topology: tests start several plans in one process, and fleet would keep the first.
    fleet.base.topology._HYBRID_PARALLEL_GROUP = None
    fleet.init(is_collective=True, strategy=_strategy(plan, batch))
    hcg = fleet.get_hybrid_communicate_group()
    ctx = ParallelContext(plan, paddle.distributed.get_rank(), device, _groups(plan, hcg))
    RECORD.names = {0: "job's", **{group.id: axis for axis, group in ctx.groups.items()}}
    _check_layout(ctx)
    return ctx


def _strategy(plan: ParallelPlan, batch: BatchPlan) -> Any:
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": plan.dp,
        "mp_degree": plan.mp,
        "pp_degree": plan.pp,
        "sharding_degree": plan.sharding,
        "sep_degree": plan.sep,
        "order": list(AXES),
    }
    # Every model-parallel rank reads the samples itself, and Paddle's broadcast does not support the CPU.
    strategy.hybrid_configs["mp_configs"].need_broadcast_data = False
    strategy.pipeline_configs = {
        "accumulate_steps": batch.accumulate_steps,
        "micro_batch_size": batch.micro_batch_size,
        # With sequence parallelism, the ranks of a tensor-parallel group hold different parts of the
        # sequence, so each rank must send its whole output to the next stage, not one piece of a replicated
        # output.
        "enable_partial_send_recv": not plan.sequence_parallel,
    }
    return strategy


def _groups(plan: ParallelPlan, hcg: Any) -> dict[str, Any]:
    of_axis = {
        "dp": hcg.get_data_parallel_group,
        "pp": hcg.get_pipe_parallel_group,
        "sharding": hcg.get_sharding_parallel_group,
        "sep": hcg.get_sep_parallel_group,
        "mp": hcg.get_model_parallel_group,
    }
    return {axis: get() for axis, get in of_axis.items() if getattr(plan, axis) > 1}


def _check_layout(ctx: ParallelContext) -> None:
    """Check that each process group of fleet contains the ranks that the plan assigns to it, because data
    loading and checkpoints rely on the plan."""
    for axis, group in ctx.groups.items():
        mine = next(ranks for ranks in ctx.plan.groups(axis) if ctx.rank in ranks)
        assert list(group.ranks) == mine, f"fleet's {axis} group is {group.ranks}, the plan's {mine}"
