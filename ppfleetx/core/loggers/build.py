"""From ``Engine.loggers`` to writers."""

from __future__ import annotations

import inspect
from pathlib import Path

from ppfleetx.config.config_notes import refuse_absent
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import LOGGERS
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.loggers.base import LogWriter

_KEY = "Engine.loggers"


def build_writers(cfg: RunConfig, output_dir: Path) -> dict[str, LogWriter]:
    """{name: writer} of ``Engine.loggers``, without those that are callbacks themselves. Nothing is opened.

    Raises:
        ConfigError: a library is missing, a writer is named twice, or its options are not those it takes.
    """
    refuse_absent(cfg)
    found: dict[str, LogWriter] = {}
    for item in cfg.Engine.loggers:
        if LOGGERS.traits(item.name).callback is not None:
            continue
        make = LOGGERS.load(item.name)
        try:
            inspect.signature(make).bind(output_dir, **item.options)
        except TypeError as error:
            raise ConfigError(f"options of {item.name}: {error}", key=_KEY, value=item.name) from None
        writer = make(output_dir, **item.options)
        if not isinstance(writer, LogWriter):
            raise ConfigError("must be made as a LogWriter", key=_KEY, value=item.name)
        found[item.name] = writer
    return found
