"""The checkpoints a configuration names as sources of weights."""

from __future__ import annotations

from collections.abc import Iterator

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import RunConfig


def sources(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Key and value of every source that is named."""
    options, lora = cfg.Engine.save_load, cfg.Model.lora
    for key, place in (
        ("Engine.save_load.ckpt_dir", options.ckpt_dir),
        ("Engine.save_load.init_from", options.init_from),
        ("Model.lora.base", None if lora is None else lora.base),
    ):
        if place is not None:
            yield key, place


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
