"""Configurations as Python programs give them: a file, a name, a mapping, with overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ppfleetx.commands.resolve_model import override, write_config
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import ConfigSource
from ppfleetx.config.reading.files import MadeFile
from ppfleetx.config.record import dump_config
from ppfleetx.config.sections.root import RunConfig

Overrides = Mapping[str, Any] | Sequence[str]
Configuration = ConfigSource | Mapping[str, Any] | RunConfig
"""A YAML file, a shipped configuration's name, nested sections, or what ``load_config`` gave."""


_PLACE = "argument config"


def override_texts(overrides: Overrides | None) -> list[str]:
    """Overrides as ``-o`` takes them: a mapping of dotted keys (or of sections), or texts ``key=value``.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(overrides, Mapping):
        return [override(key, value, "overrides") for key, value in _leaves(overrides, "")]
    texts = [overrides] if isinstance(overrides, str) else list(overrides or ())
    for text in texts:
        if not isinstance(text, str):
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
            yield key, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


def config_file(config: Configuration, stack: ExitStack) -> ConfigSource:
    """A file with the configuration, removed when ``stack`` ends if it was made for this."""
    if isinstance(config, Mapping):
        return write_config(_tree(config), stack, _PLACE)
    if isinstance(config, RunConfig):
        file = write_config({}, stack, _PLACE)
        file.path.write_text(dump_config(config), "utf-8")
        return file
    return config if isinstance(config, MadeFile) else str(config)


def _tree(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections, also where keys were written with dots."""
    tree: dict[str, Any] = {}
    for key, value in _leaves(config, ""):
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree
