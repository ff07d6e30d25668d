"""``Model.module`` by name."""

from __future__ import annotations

from ppfleetx.config.registries import MODULES
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.module import BasicModule


def build_module(cfg: RunConfig) -> BasicModule:
    """The task named by ``Model.module``.

    Raises:
        ConfigError: there is no such module, or it is not a BasicModule.
    """
    return MODULES.make(cfg.Model.module, cfg, gives=BasicModule)
