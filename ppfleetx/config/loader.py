"""Load a configuration: file and bases, overrides, old spellings, types, derived values, rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.fleetx_compat import modernize
from ppfleetx.config.overrides import apply_overrides
from ppfleetx.config.resolve import resolve
from ppfleetx.config.sections import RunConfig
from ppfleetx.config.tree import Node, merge, read_yaml, strip_marks
from ppfleetx.config.validate import validate


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None
) -> RunConfig:
    """Read a YAML configuration, check all of it and fill in what follows.

    Args:
        path: the YAML file; its ``_base_`` files are read relative to it.
        overrides: ``Section.key=value`` texts, applied in order after the files.
        world_size: number of processes of the job. The degrees must multiply to it, and an open
            ``dp_degree`` is derived from it; None: an open ``dp_degree`` is 1.

    Raises:
        ConfigError: anything wrong, with key, value, place and rule.
    """
    tree, warnings = read_with_bases(Path(path))
    tree, more = modernize(apply_overrides(tree, overrides, RunConfig))
    cfg, origins = validate(tree, RunConfig)
    return resolve(cfg, origins, tuple(dict.fromkeys((*warnings, *more))), world_size)


def dump_config(cfg: RunConfig) -> str:
    """``cfg`` as YAML with every key; loading it gives an equal configuration."""
    return yaml.safe_dump(cfg.model_dump(), sort_keys=False, allow_unicode=True, width=110)


def read_with_bases(path: Path, chain: tuple[Path, ...] = ()) -> tuple[Node, tuple[str, ...]]:
    """The tree of ``path`` merged over its ``_base_`` files (the last of a list is strongest), and warnings.

    Old spellings are rewritten file by file, so that a file's old spelling replaces its base's new one.
    """
    here = path.resolve()
    if here in chain:
        circle = " -> ".join(p.name for p in (*chain[chain.index(here) :], here))
        raise ConfigError(f"_base_ files form a circle: {circle}", place=str(path))
    tree = read_yaml(path)
    base_node = tree.value.pop("_base_", None)
    tree, warnings = modernize(tree)
    if base_node is None or base_node.value is None:
        return strip_marks(tree), warnings
    merged: Node | None = None
    for name in _base_names(base_node):
        base_path = path.parent / name
        if not base_path.exists():
            raise ConfigError("there is no such file", key="_base_", value=name, place=base_node.place)
        base, more = read_with_bases(base_path, (*chain, here))
        warnings = tuple(dict.fromkeys((*more, *warnings)))
        merged = base if merged is None else merge(merged, base)
    return (strip_marks(tree) if merged is None else merge(merged, tree)), warnings


def _base_names(node: Node) -> list[str]:
    items = node.value if isinstance(node.value, list) else [node]
    for item in items:
        if not isinstance(item.value, str):
            raise ConfigError(
                "must be a file name or a list of file names",
                key="_base_",
                value=item.value,
                place=item.place,
            )
    return [item.value for item in items]
