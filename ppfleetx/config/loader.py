"""Load a configuration: read files, apply overrides, rewrite old spellings, check, fill in derived values."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.field_annotations import ppfleetx_key
from ppfleetx.config.fleetx_keys import modernize, refuse_unsupported
from ppfleetx.config.reading.overrides import Override, apply_overrides
from ppfleetx.config.reading.parse import Sections, read_yaml
from ppfleetx.config.reading.tree import Node, file_names, merge, node_of, strip_marks
from ppfleetx.config.registry import PLUGINS_VARIABLE, imported_plugins
from ppfleetx.config.resolve import resolve
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.shipped import find_config
from ppfleetx.config.validate import validate

CONFIG_FILE = "config.yaml"

ConfigSource = str | Path | Sections
"""A YAML file, a directory with a ``config.yaml``, the name of a shipped configuration, or nested
sections."""


def _read(path: Path, chain: tuple[Path, ...] = (), **entry: Any) -> tuple[Node, tuple[str, ...]]:
    """Read ``path`` and merge it over its base files. Returns the tree, and warnings about old spellings.

    Args:
        chain: the files that led to ``path``. Each names the next one in its ``_base_``, and the last one
            names ``path``.
        entry: for messages, the ``key``, ``value`` and ``place`` of the ``_base_`` entry that names ``path``.
    """
    if path.resolve() in map(Path.resolve, chain):
        names = " -> ".join(one.name for one in (*chain, path))
        raise ConfigError(f"_base_ files form a circle: {names}", **entry)
    return _over_bases(read_yaml(path, **entry), (*chain, path))


def _over_bases(tree: Node, chain: tuple[Path, ...]) -> tuple[Node, tuple[str, ...]]:
    """Merge ``tree`` over the files in its ``_base_``. Later base files override earlier ones. Returns the
    merged tree, and warnings about old spellings.

    Args:
        chain: the files that are being read. Each names the next one in its ``_base_``. The last one contains
            ``tree``.
    """
    base_node = tree.value.pop("_base_", None)
    tree, warnings = modernize(tree)  # before merging, so that an old key overrides the new key in a base
    merged: Node | None = None
    for item in file_names(base_node, "_base_"):
        named = chain[-1].parent / item.value
        plain = Path(
            os.path.normpath(named)
        )  # shorter in messages; not used if a symlink makes it another file
        named = plain if plain.resolve() == named.resolve() else named
        base, more = _read(named, chain, key="_base_", value=item.value, place=item.place)
        warnings = tuple(dict.fromkeys((*more, *warnings)))
        merged = base if merged is None else merge(merged, base)
    return (strip_marks(tree) if merged is None else merge(merged, tree)), warnings


def load_config(
    path: ConfigSource, overrides: Sequence[Override] = (), *, world_size: int | None = None
) -> RunConfig:
    """Read a YAML configuration, check all of it and fill in derived values.

    Args:
        path: a YAML file, a directory with a ``config.yaml``, or the name of a shipped configuration.
        overrides: strings ``Section.key=value`` or :class:`Setting` objects, applied in order.
        world_size: the number of processes, which must equal the product of the parallel degrees. An unset
            ``dp_degree`` is derived from it. None: unknown; then an unset ``dp_degree`` is 1.

    Raises:
        ConfigError: the configuration has a mistake. The message shows the key, its value, where it was
            written, and the rule that it breaks.
    """
    cfg, origins, warnings = read_config(path, overrides)
    return resolve(cfg, origins, warnings, world_size)


def load_tree(tree: Node, warnings: Sequence[str] = (), *, world_size: int | None = None) -> RunConfig:
    """Check a configuration that was translated from another toolkit, and fill in derived values.

    Args:
        warnings: warnings from the translation; they become warnings of the returned configuration.
        world_size: the number of processes, which must equal the product of the parallel degrees; None:
            unknown.

    Raises:
        ConfigError: the configuration has a mistake. The message shows the key, its value, where it was
            written, and the rule that it breaks.
    """
    cfg, origins = validate(tree)
    return resolve(cfg, origins, tuple(warnings), world_size)


def read_config(
    path: ConfigSource, overrides: Sequence[Override] = ()
) -> tuple[RunConfig, dict[str, str], tuple[str, ...]]:
    """Read a YAML configuration and validate each of its sections.

    Derived values are not filled in, and rules between sections are not checked. The arguments have the same
    meaning as in :func:`load_config`. Returns the configuration, where each value was written (by dotted
    key), and warnings.

    Raises:
        ConfigError: the configuration has a mistake. The message shows the key, its value, where it was
            written, and the rule that it breaks.
    """
    if isinstance(path, Sections):
        tree, warnings = _over_bases(node_of(path.values, path.place), (Path(CONFIG_FILE),))
    else:
        file = find_config(path)
        if os.path.isfile(file / CONFIG_FILE):  # noqa: PTH113 - a name no file can have is refused below
            file = file / CONFIG_FILE
        tree, warnings = _read(file)
    _refuse_foreign(tree)
    tree, more = modernize(apply_overrides(tree, overrides, RunConfig), is_whole=True)
    refuse_unsupported(tree)
    _refuse_unimported_plugins(tree)
    cfg, origins = validate(tree)
    cfg = _with_plugins(cfg, origins)
    return cfg, origins, tuple(dict.fromkeys((*warnings, *more)))


def _refuse_unimported_plugins(tree: Node) -> None:
    """Raise ConfigError if ``Global.plugins`` lists a plugin that has not been imported. The user must name
    it, with ``--plugin`` or ``PPFLEETX_PLUGINS``, so a configuration file alone never makes code run."""
    section = tree.value.get("Global")
    wanted = section.value.get("plugins") if section and isinstance(section.value, dict) else None
    if wanted is None or not isinstance(wanted.value, list):
        return
    names = [item.value for item in wanted.value if isinstance(item.value, str)]
    missing = [name for name in names if name not in imported_plugins and name not in sys.modules]
    if missing:
        raise ConfigError(
            f"this configuration needs the plugin{'s' if len(missing) > 1 else ''} {', '.join(missing)}, "
            "which runs code that is not part of this program. If you trust it, name it yourself: "
            f"{' '.join(f'--plugin {name}' for name in missing)} (or "
            f"{PLUGINS_VARIABLE}={','.join(missing)}). A file alone never makes code run.",
            key="Global.plugins",
            value=names,
            place=wanted.place,
        )


def _with_plugins(cfg: RunConfig, origins: dict[str, str]) -> RunConfig:
    """Return ``cfg`` with the plugins of the option ``--plugin`` added to ``Global.plugins``."""
    plugins = tuple(dict.fromkeys((*cfg.Global.plugins, *imported_plugins)))
    if plugins == cfg.Global.plugins:
        return cfg
    origins["Global.plugins"] = "--plugin"
    return cfg.changed("Global", plugins=plugins)


_ENOUGH = 2  # one key may coincide with a name of another toolkit
_MAX_SHOWN = 12
_ADVICE = (
    "ppfleetx translate FILE --to OURS.yaml rewrites files of Megatron-LM, MindSpeed, MindFormers and "
    "PaddleFormers (docs/other_toolkits.md); ppfleetx convert --from hf converts a Hugging Face checkpoint "
    "with its configuration."
)


def _refuse_foreign(tree: Node) -> None:
    """Raise ConfigError if ``tree`` is the configuration of another toolkit: it has several options of that
    toolkit, but no section of ppfleetx."""
    if not tree.value.keys().isdisjoint(RunConfig.model_fields):
        return
    known = {key: ours for key in _all_keys(tree) if (ours := ppfleetx_key(key)) is not None}
    if len(known) < _ENOUGH:
        return
    shown = [f"\n  {key} is {ours}" for key, ours in list(known.items())[:_MAX_SHOWN]]
    raise ConfigError(
        "this is another toolkit's configuration: it has no section of this program, such as Model.",
        place=tree.place,
        hint=f"{_ADVICE} Here{''.join(shown)}",
    )


def _all_keys(tree: Node) -> Iterator[str]:
    for key, node in tree.value.items():
        yield key
        if isinstance(node.value, dict):
            yield from _all_keys(node)
