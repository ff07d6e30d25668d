"""Write a loaded configuration as YAML with every key.

Derived values become comments, so that they are computed again when the file is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ppfleetx.config.section import Section
from ppfleetx.config.sections.root import RunConfig

_RECORD_MARK = "# The configuration of a run."
_HEAD = f"""\
{_RECORD_MARK} Every key is here. What is marked as derived followed from other keys or from
# the number of processes; it is computed again when the file is used.
# Engine.save_load.resume is auto, so this command continues the run:
#   ppfleetx train -c THIS_FILE
"""
# The text that marks the position of a derived value until a comment replaces it.
_PLACEHOLDER = "!derived {}"
_PLACEHOLDER_LINE = re.compile(r"^( *)(\w+): '!derived (\d+)'$", re.MULTILINE)


def run_record(cfg: RunConfig) -> str:
    """Return the content of the ``config.yaml`` in a run's output directory. Training with this file resumes
    the run."""
    save_load = cfg.Engine.save_load.model_copy(update={"resume": "auto", "overwrite": False})
    engine = cfg.Engine.model_copy(update={"save_load": save_load})
    return _HEAD + dump_config(cfg.model_copy(update={"Engine": engine}))


def is_record(path: Path) -> bool:
    """Return whether the file ``path`` was written by :func:`run_record`."""
    try:
        with path.open("rb") as file:
            return file.read(len(_RECORD_MARK)) == _RECORD_MARK.encode()
    except FileNotFoundError:
        return False


def dump_config(cfg: RunConfig) -> str:
    """Return ``cfg`` as YAML with every key, and with derived values as comments.

    Loading the YAML for the same number of processes gives an equal configuration.
    """
    derived: list[Any] = []
    tree = _tree(cfg, "", cfg, derived)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=110)
    return _PLACEHOLDER_LINE.sub(lambda line: _comment(line, derived), text)


def flat_values(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value in nested mappings. An empty mapping counts as a value."""
    if not isinstance(tree, dict) or (prefix and not tree):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from flat_values(value, f"{prefix}.{key}" if prefix else str(key))


def without_derived(cfg: RunConfig) -> dict[str, Any]:
    """Convert ``cfg`` to nested plain values, and leave out derived values."""
    return _tree(cfg, "", cfg, None)


def _tree(section: Section, prefix: str, cfg: RunConfig, derived: list[Any] | None) -> dict[str, Any]:
    """Convert ``section`` to nested plain values.

    If ``derived`` is None, derived values are left out. If it is a list, they are appended to it, and the
    result has placeholders in their place.
    """
    plain = section.model_dump()
    for name in type(section).model_fields:
        key, value = f"{prefix}{name}", getattr(section, name)
        if isinstance(value, Section):
            plain[name] = _tree(value, f"{key}.", cfg, derived)
        elif key in cfg.derived and derived is None:
            del plain[name]
        elif key in cfg.derived:
            derived.append(plain[name])
            plain[name] = _PLACEHOLDER.format(len(derived) - 1)
    return plain


def _comment(line: re.Match[str], derived: list[Any]) -> str:
    indent, name, number = line.groups()
    value = yaml.safe_dump([derived[int(number)]], default_flow_style=True, width=1 << 20).strip()[1:-1]
    return f"{indent}# {name}: {value}  # derived"
