"""Export, inference, quantising and pruning hold the whole model in each process, whatever its plan was."""

from __future__ import annotations

from ppfleetx.config.sections.root import DistributedConfig, RunConfig


def as_replicas(cfg: RunConfig, processes: int) -> tuple[RunConfig, list[str]]:
    """``cfg`` for so many data-parallel processes that compute in float32, and what was changed, in words."""
    notes = []
    plan = cfg.plan
    if plan.world_size not in (1, processes) or plan.mp * plan.pp * plan.sep > 1:
        notes.append(f"the plan of the configuration ({plan}) is not used: a process holds the whole model")
    if cfg.Engine.mix_precision.enable:
        notes.append("Engine.mix_precision is disabled: the model computes in float32")
    distributed = DistributedConfig(dp_degree=processes)
    model = cfg.Model.model_copy(update={"sequence_parallel": False, "virtual_pp_degree": 1})
    precision = cfg.Engine.mix_precision.model_copy(update={"enable": False})
    engine = cfg.Engine.model_copy(update={"mix_precision": precision})
    return cfg.model_copy(update={"Distributed": distributed, "Model": model, "Engine": engine}), notes
