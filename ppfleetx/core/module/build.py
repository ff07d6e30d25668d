"""``Model.module`` by name."""

from __future__ import annotations

from ppfleetx.config.registries import MODULES
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.module import BasicModule


def build_module(cfg: RunConfig) -> BasicModule:
    """The task named by ``Model.module``, with a teacher where ``Compress.Distill`` names one.

    Raises:
        ConfigError: there is no such module, or it is not a BasicModule.
    """
    task = MODULES.make(cfg.Model.module, cfg, gives=BasicModule)
    if cfg.Compress.Distill is None:
        return task
    from ppfleetx.compress.distill import Distillation

    return Distillation(task, cfg.Compress.Distill)
