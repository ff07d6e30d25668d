"""``Model.module`` by name."""

from __future__ import annotations

from collections.abc import Sequence

from ppfleetx.config.registries import MODULES
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.module.source_losses import SourceLosses
from ppfleetx.models.module import BasicModule


def build_module(cfg: RunConfig, sources: Sequence[str] = ()) -> BasicModule:
    """The task named by ``Model.module``, with a teacher where ``Compress.Distill`` names one.

    Args:
        cfg: the run's configuration.
        sources: names of what a blend is made of, where the loss of each is wanted.

    Raises:
        ConfigError: there is no such module, or it is not a BasicModule.
    """
    task = MODULES.make(cfg.Model.module, cfg, gives=BasicModule)
    if cfg.Compress.Distill is not None:
        from ppfleetx.compress.distill import Distillation

        task = Distillation(task, cfg.Compress.Distill)
    return SourceLosses(task, sources) if sources else task
