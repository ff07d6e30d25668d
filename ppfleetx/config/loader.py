"""Load a configuration: file and bases, overrides, old spellings, types, derived values, rules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ppfleetx.config.other_toolkits.fleetx import modernize
from ppfleetx.config.other_toolkits.fleetx_scope import refuse_left_out
from ppfleetx.config.other_toolkits.foreign import refuse_foreign
from ppfleetx.config.plugins import imported_plugins, refuse_unnamed
from ppfleetx.config.reading.bases import read_with_bases
from ppfleetx.config.reading.files import MadeFile, Sections
from ppfleetx.config.reading.overrides import Override, apply_overrides
from ppfleetx.config.reading.tree import Node
from ppfleetx.config.resolve import resolve
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.shipped import find_config
from ppfleetx.config.validate import validate

CONFIG_FILE = "config.yaml"

ConfigSource = str | Path | MadeFile | Sections
"""What a configuration is read from."""


def load_config(
    path: ConfigSource, overrides: Sequence[Override] = (), *, world_size: int | None = None
) -> RunConfig:
    """Read a YAML configuration, check all of it and fill in what follows.

    Args:
        path: the YAML file; its ``_base_`` files are read relative to it. A directory stands for the
            ``config.yaml`` in it, if there is one: an output directory, or a converted model's. What is not
            there may be the name of a shipped configuration (:mod:`ppfleetx.config.shipped`).
        overrides: ``Section.key=value`` texts or typed settings, applied in order after the files.
        world_size: number of processes of the job. The degrees must multiply to it, and an open
            ``dp_degree`` is derived from it; None: an open ``dp_degree`` is 1.

    Raises:
        ConfigError: anything wrong, with key, value, place and rule.
    """
    cfg, origins, warnings = read_config(path, overrides)
    return resolve(cfg, origins, warnings, world_size)


def load_tree(tree: Node, warnings: Sequence[str] = (), *, world_size: int | None = None) -> RunConfig:
    """:func:`load_config` of a translated configuration: each node's place says where it came from.

    Args:
        tree: sections and keys in today's spelling.
        warnings: what tools should log about the translation.
        world_size: as in :func:`load_config`.

    Raises:
        ConfigError: anything wrong, with key, value, place and rule.
    """
    cfg, origins = validate(tree, RunConfig)
    return resolve(cfg, origins, tuple(warnings), world_size)


def read_config(
    path: ConfigSource, overrides: Sequence[Override] = ()
) -> tuple[RunConfig, dict[str, str], tuple[str, ...]]:
    """The configuration as it is written, with the place of every value and warnings.

    Each section is sound; what follows from the rest is not filled in, and no rule between sections is
    checked. The arguments are those of :func:`load_config`.
    """
    if isinstance(path, str | Path):
        path = find_config(path)
        if os.path.isfile(path / CONFIG_FILE):  # noqa: PTH113 - a name no file can have is refused below
            path = path / CONFIG_FILE
    tree, warnings = read_with_bases(path)
    refuse_foreign(tree, frozenset(RunConfig.model_fields))
    tree, more = modernize(apply_overrides(tree, overrides, RunConfig), is_whole=True)
    refuse_left_out(tree)
    refuse_unnamed(tree)
    cfg, origins = validate(tree, RunConfig)
    cfg = _with_plugins(cfg, origins)
    return cfg, origins, tuple(dict.fromkeys((*warnings, *more)))


def _with_plugins(cfg: RunConfig, origins: dict[str, str]) -> RunConfig:
    """``cfg`` with those of ``--plugin`` added to ``Global.plugins``; it may name what they register."""
    plugins = tuple(dict.fromkeys((*cfg.Global.plugins, *imported_plugins())))
    if plugins == cfg.Global.plugins:
        return cfg
    origins["Global.plugins"] = "--plugin"
    return cfg.changed("Global", plugins=plugins)
