"""``Model.module`` by name."""

from __future__ import annotations

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.module.eval import GPTEvalModule
from ppfleetx.core.module.finetune import GPTFinetuneModule
from ppfleetx.core.module.gpt import GPTModule
from ppfleetx.models.module import BasicModule

# Generation runs the same network and never asks for its loss.
MODULES: dict[str, type[BasicModule]] = {
    "GPTModule": GPTModule,
    "GPTEvalModule": GPTEvalModule,
    "GPTGenerationModule": GPTModule,
    "GPTFinetuneModule": GPTFinetuneModule,
}


def build_module(cfg: RunConfig) -> BasicModule:
    """The task named by ``Model.module``.

    Raises:
        ConfigError: a module this version does not have.
    """
    name = cfg.Model.module
    if name not in MODULES:
        raise ConfigError(
            f"this program has {', '.join(sorted(MODULES))} only", key="Model.module", value=name
        )
    return MODULES[name](cfg)
