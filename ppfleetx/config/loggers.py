"""Whether the libraries that ``Engine.loggers`` needs are there; found out without importing them."""

from __future__ import annotations

import importlib.util

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import LOGGERS
from ppfleetx.config.sections.root import RunConfig


def absent_loggers(cfg: RunConfig) -> dict[str, str]:
    """{logger: what is to be installed} of those whose library is not there."""
    found = {}
    for item in cfg.Engine.loggers:
        traits = LOGGERS.traits(item.name)
        if traits.package is not None and importlib.util.find_spec(traits.package) is None:
            found[item.name] = f"`pip install 'ppfleetx[{traits.extra}]'`, which brings {traits.package}"
    return found


def refuse_absent(cfg: RunConfig) -> None:
    """Raise where a library is missing.

    Raises:
        ConfigError: naming the first such logger and what installs it.
    """
    for name, wanted in absent_loggers(cfg).items():
        key = "Engine.loggers"
        raise ConfigError(f"needs {wanted}", key=key, value=name, place=cfg.origins.get(key))
