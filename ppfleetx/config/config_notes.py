"""Explain why a valid configuration cannot run here: missing keys or libraries."""

from __future__ import annotations

import importlib.util

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import LOGGERS
from ppfleetx.config.sections.root import RunConfig


def missing(cfg: RunConfig) -> list[str]:
    """Explain, in a sentence per key, which keys a run of ``cfg`` needs but does not set."""
    splits = {name: getattr(cfg.Data, name) for name in ("Train", "Eval", "Test")}
    texts = [name for name, split in splits.items() if split is not None and split.dataset.is_texts]
    if not texts or cfg.Data.tokenizer is not None:
        return []
    return [f"Data.tokenizer: the texts of Data.{texts[0]} need one (-o Data.tokenizer.dir=DIR)"]


def absent_loggers(cfg: RunConfig) -> dict[str, str]:
    """Return ``{logger: what to install}`` for each logger whose library is not installed, without importing
    it.
    """
    found = {}
    for item in cfg.Engine.loggers:
        traits = LOGGERS.traits(item.name)
        if traits.package is not None and importlib.util.find_spec(traits.package) is None:
            found[item.name] = f"`pip install 'ppfleetx[{traits.extra}]'`, which brings {traits.package}"
    return found


def refuse_absent(cfg: RunConfig) -> None:
    """Raise ConfigError for the first logger whose library is not installed, with what to install."""
    for name, wanted in absent_loggers(cfg).items():
        key = "Engine.loggers"
        raise ConfigError(f"needs {wanted}", key=key, value=name, place=cfg.origins.get(key))
