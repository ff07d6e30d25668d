"""The whole configuration of a run as one immutable object."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from pydantic import PrivateAttr

from ppfleetx.config.batch_sizes import BatchPlan
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.section import Section
from ppfleetx.config.sections.compress import CompressConfig
from ppfleetx.config.sections.data import DataConfig, EvalConfig
from ppfleetx.config.sections.distributed import DistributedConfig
from ppfleetx.config.sections.engine import EngineConfig, GlobalConfig, ProfilerConfig
from ppfleetx.config.sections.generation import (
    GenerationConfig,
    InferenceConfig,
    OfflineEvalConfig,
    ServeConfig,
)
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.optimizer import OptimizerConfig


class RunConfig(Section):
    """The configuration of one run, as :func:`ppfleetx.config.loader.load_config` returns it."""

    Global: GlobalConfig = GlobalConfig()
    Engine: EngineConfig = EngineConfig()
    Model: ModelConfig
    Data: DataConfig = DataConfig()
    Distributed: DistributedConfig = DistributedConfig()
    Optimizer: OptimizerConfig = OptimizerConfig()
    Generation: GenerationConfig = GenerationConfig()
    Inference: InferenceConfig = InferenceConfig()
    Serve: ServeConfig = ServeConfig()
    Offline_Eval: OfflineEvalConfig = OfflineEvalConfig()
    Profiler: ProfilerConfig = ProfilerConfig()
    Compress: CompressConfig = CompressConfig()

    _batch: BatchPlan | None = PrivateAttr(default=None)
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _derived: frozenset[str] = PrivateAttr(default=frozenset())
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @property
    def plan(self) -> ParallelPlan:
        """The parallel plan; an unset ``dp_degree`` counts as 1."""
        distributed, sharding = self.Distributed, self.Distributed.sharding
        return ParallelPlan(
            dp=distributed.dp_degree or 1,
            mp=distributed.mp_degree,
            pp=distributed.pp_degree,
            sharding=sharding.sharding_degree,
            sep=distributed.sep_degree,
            ep=distributed.ep_degree,
            expert_mp=distributed.expert_mp_degree,
            sharding_stage=sharding.sharding_stage,
            sharding_offload=sharding.sharding_offload,
            sequence_parallel=self.Model.sequence_parallel,
            virtual_pp_degree=self.Model.virtual_pp_degree,
            pp_schedule=distributed.pp_schedule,
            pp_layers=distributed.layers_of_chunks(self.Model.num_layers, self.Model.virtual_pp_degree),
        )

    @property
    def batch(self) -> BatchPlan:
        """The batch sizes of the run. Raises RuntimeError if ``load_config`` did not make this object."""
        if self._batch is None:
            raise RuntimeError("RunConfig.batch is known only after load_config")
        return self._batch

    @property
    def origins(self) -> dict[str, str]:
        """The place where the user set each key, by dotted key: ``file:line``, ``-o override n``, or the name
        of another option or argument, such as ``--output``. Keys that the user did not set are missing."""
        return dict(self._origins)

    @property
    def derived(self) -> frozenset[str]:
        """The dotted keys whose values follow from other keys or the number of processes."""
        return self._derived

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings from reading the configuration, such as old spellings of keys."""
        return self._warnings

    def weight_sources(self) -> Iterator[tuple[str, str]]:
        """Yield (key, path) for each checkpoint from which a run loads weights. The keys are
        ``Engine.save_load.ckpt_dir``, ``Engine.save_load.init_from`` and ``Model.lora.base``. Keys that are
        not set are left out."""
        for key in ("Engine.save_load.ckpt_dir", "Engine.save_load.init_from", "Model.lora.base"):
            if (place := self.value_of(key)) is not None:
                yield key, place

    def value_of(self, key: str) -> Any:
        """The value of the dotted ``key``, e.g. ``Model.lora.rank``; None if a section on the way is null."""
        return reduce(lambda node, name: None if node is None else getattr(node, name), key.split("."), self)

    def error(self, key: str, rule: str) -> ConfigError:
        """Return a ConfigError about the value of ``key``, with ``rule`` as the explanation.

        The message also shows the value and the place where it was written.
        """
        return ConfigError(rule, key=key, value=self.value_of(key), place=self._origins.get(key))

    def changed(self, section: str, **values: Any) -> RunConfig:
        """Return a copy of the configuration with other values in ``section``. The values are not
        validated."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def __eq__(self, other: object) -> bool:
        """Compare all values, regardless of where they were written."""
        if not isinstance(other, RunConfig):
            return NotImplemented
        return self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]


def data_sets(cfg: RunConfig, mode: str = "Eval") -> dict[str | None, RunConfig]:
    """Return a copy of ``cfg`` for each data set in ``Data.<mode>.sets``, by the set's name, in order. Each
    copy has only its own set.

    Without ``sets``, the result is ``{None: cfg}``. The result is empty if ``Data.<mode>`` is null.
    """
    section = getattr(cfg.Data, mode)
    if section is None:
        return {}
    if not isinstance(section, EvalConfig) or not section.sets:
        return {None: cfg}
    return {name: cfg.changed("Data", Eval=section.of_set(name)) for name in section.sets}
