"""A configuration under another plan than its own: read, replanned, written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.config.loader import read_config
from ppfleetx.config.plan import CONFIG_KEYS, ParallelPlan
from ppfleetx.config.record import dump_config
from ppfleetx.config.resolve import resolve
from ppfleetx.config.sections.root import RunConfig, plan_of
from ppfleetx.nn.cost import Recompute
from ppfleetx.planner.case import Case
from ppfleetx.utils.files import atomic_write, refuse_as_new_file


@dataclass(frozen=True)
class Written:
    """A configuration as written, whose plan is not checked against its sizes yet.

    Attributes:
        cfg: the values.
        origins: the place of each.
        warnings: of reading.
    """

    cfg: RunConfig
    origins: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def plan(self) -> ParallelPlan:
        """Its own plan; an open ``dp_degree`` is 1."""
        return plan_of(self.cfg)

    def batch(self) -> int:
        """Sequences of a step under its own plan.

        Raises:
            ConfigError: the sizes leave it open, or contradict each other.
        """
        sizes, plan = self.cfg.Global, self.plan
        if sizes.global_batch_size is not None:
            return sizes.global_batch_size
        if sizes.local_batch_size is not None:
            return sizes.local_batch_size * plan.data_size
        return resolve(self.cfg, dict(self.origins), self.warnings, None).batch.global_batch_size

    def micro_batch(self) -> int:
        """Sequences of a forward pass."""
        sizes = self.cfg.Global
        if sizes.micro_batch_size is not None:
            return sizes.micro_batch_size
        return resolve(self.cfg, dict(self.origins), self.warnings, None).batch.micro_batch_size

    def under(self, plan: ParallelPlan, micro: int, batch: int, recompute: Recompute | None) -> RunConfig:
        """The same run under ``plan``; with ``recompute`` None layers recompute as before.

        Raises:
            ConfigError: the configuration is not valid under this plan.
        """
        cfg = self.cfg
        sharding = {
            "sharding_degree": plan.sharding,
            "sharding_stage": plan.sharding_stage,
            "sharding_offload": plan.sharding_offload,
        }
        degrees = {f"{axis}_degree": getattr(plan, axis) for axis in ("dp", "mp", "pp", "sep")}
        layers = {} if plan.pp_layers is not None else {"pp_layers": None, "noop_layers": None}
        split, scatters = plan.sequence_parallel, cfg.Distributed.sp_async_reduce_scatter
        whole = plan.pp > 1 and plan.virtual_pp_degree == 1
        overlaps = {
            "overlap_p2p_comm": cfg.Distributed.overlap_p2p_comm and whole,
            "mp_async_allreduce": cfg.Distributed.mp_async_allreduce and plan.mp > 1 and not split,
            "sp_async_reduce_scatter": scatters and split,
            "recompute_allgather": cfg.Distributed.recompute_allgather and scatters and split,
        }
        distributed = {
            **degrees,
            **layers,
            **overlaps,
            "pp_schedule": plan.pp_schedule,
            "sharding": cfg.Distributed.sharding.model_copy(update=sharding),
        }
        model = {
            "sequence_parallel": plan.sequence_parallel,
            "virtual_pp_degree": plan.virtual_pp_degree,
            **_recompute_keys(recompute),
        }
        sizes = {"global_batch_size": batch, "local_batch_size": None, "micro_batch_size": micro}
        changed = {
            "Distributed": cfg.Distributed.model_copy(update=distributed),
            "Model": cfg.Model.model_copy(update=model),
            "Global": cfg.Global.model_copy(update=sizes),
            "Engine": cfg.Engine.model_copy(update={"accumulate_steps": None}),
        }
        said = dict.fromkeys((*CONFIG_KEYS.values(), *(f"Global.{size}" for size in sizes)), "--plan")
        return resolve(cfg.model_copy(update=changed), {**self.origins, **said}, self.warnings, None)


def _recompute_keys(recompute: Recompute | None) -> dict[str, object]:
    if recompute is None:
        return {}
    every = {"recompute_layers": None, "no_recompute_layers": None, "recompute_interval": 1}
    granularity = None if recompute == "none" else recompute
    return {"use_recompute": recompute != "none", "recompute_granularity": granularity, **every}


def read_written(path: str | Path, overrides: Sequence[str]) -> Written:
    """Read a configuration without checking its plan.

    Raises:
        ConfigError: the configuration is wrong otherwise.
    """
    return Written(*read_config(path, overrides))


def write_config(cfg: RunConfig, case: Case, path: Path) -> None:
    """Write ``cfg``, the configuration of ``case``, as a file to train from.

    Raises:
        ConfigError: ``path`` exists already, or its directory does not.
    """
    refuse_as_new_file(path, "--write")
    head = (
        f"# Written by ppfleetx plan: {case.plan} on {case.plan.world_size} devices. Every key is here;\n"
        f"# derived ones are comments.\n"
    )
    with atomic_write(path, "w") as file:
        file.write(head + dump_config(cfg))
