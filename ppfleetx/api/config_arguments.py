"""Convert the configuration and overrides of a Python caller into arguments of ``load_config``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import ConfigSource
from ppfleetx.config.reading.overrides import Override, Setting
from ppfleetx.config.reading.parse import Sections
from ppfleetx.config.reading.tree import nested
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.yaml_dump import without_derived

Overrides = Mapping[str, Any] | Sequence[str]
Configuration = ConfigSource | Mapping[str, Any] | RunConfig
"""A YAML file, the name of a shipped configuration, nested sections, or the result of ``load_config``."""

_PLACE = "argument config"


def settings_of(overrides: Overrides | None) -> list[Override]:
    """Convert overrides to a list for :func:`~ppfleetx.config.loader.load_config`. ``overrides`` is a mapping
    of dotted keys, a mapping of nested sections, a string ``key=value``, or a list of such strings. Raises
    ConfigError if the list contains anything else."""
    if isinstance(overrides, Mapping):
        return [Setting(key, value, "overrides") for key, value in _leaves(overrides, "")]
    texts = [overrides] if isinstance(overrides, str) else list(overrides or ())
    for text in texts:
        if not isinstance(text, Override):
            raise ConfigError(
                f"an override is a text Section.key=value, or an item of a mapping, not {text!r}"
            )
    return texts


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def config_source(config: Configuration) -> ConfigSource:
    """Convert a configuration (path, name of a shipped configuration, mapping or ``RunConfig``) to a form
    that :func:`~ppfleetx.config.loader.load_config` accepts."""
    if isinstance(config, RunConfig):
        return Sections(without_derived(config), _PLACE)
    return Sections(nested(_leaves(config, "")), _PLACE) if isinstance(config, Mapping) else config
