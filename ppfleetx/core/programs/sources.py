"""The checkpoints a configuration names as sources of weights."""

from __future__ import annotations

from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.run_directory import sources


def named_checkpoint(cfg: RunConfig) -> str:
    """``Engine.save_load.ckpt_dir``, for programs that need one.

    Raises:
        ConfigError: it is not given.
    """
    if cfg.Engine.save_load.ckpt_dir is None:
        raise ConfigError(
            "names no checkpoint; give -o Engine.save_load.ckpt_dir=DIR (a step directory or an output "
            "directory of a training run)",
            key="Engine.save_load.ckpt_dir",
        )
    return cfg.Engine.save_load.ckpt_dir


def refuse_foreign(cfg: RunConfig) -> None:
    """Say how to convert a source that another program wrote. One that is not there yet is passed over.

    Raises:
        ConfigError: naming the key.
    """
    named = list(sources(cfg))
    if not named:
        return
    from ppfleetx.conversion.detect import described  # knows many formats, which takes time to load

    for key, place in named:
        if sentence := described(Path(place)):
            raise ConfigError(sentence, key=key, value=place, place=cfg.origins.get(key))
