"""Export and inference hold the whole model in one process, whatever plan it was trained with."""

from __future__ import annotations

from ppfleetx.config.sections import DistributedConfig, RunConfig


def as_one_process(cfg: RunConfig) -> tuple[RunConfig, list[str]]:
    """``cfg`` with all degrees 1 and computing in float32, and what was changed, as sentences."""
    notes = []
    if cfg.plan.world_size > 1:
        notes.append(
            f"the plan of the configuration ({cfg.plan}) is not used: one process holds the whole model"
        )
    if cfg.Engine.mix_precision.enable:
        notes.append("Engine.mix_precision is disabled: the model is exported and run in float32")
    distributed = DistributedConfig(dp_degree=1)
    model = cfg.Model.model_copy(update={"sequence_parallel": False, "virtual_pp_degree": 1})
    precision = cfg.Engine.mix_precision.model_copy(update={"enable": False})
    engine = cfg.Engine.model_copy(update={"mix_precision": precision})
    return cfg.model_copy(update={"Distributed": distributed, "Model": model, "Engine": engine}), notes
