"""The registry of dialects, and how to recognize the dialect of a file or a command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.dialects.key_tables import KeyTable
from ppfleetx.dialects.translation import Translation
from ppfleetx.dialects.user_values import normal_name, refuse_other_models

_MODULES: tuple[str, ...] = (
    "mindformers.dialect",
    "megatron.dialect",
    "mindspeed.dialect",
    "paddleformers.dialect",
)
"""Modules that define a ``DIALECT``. If several match equally well, the first one wins."""


@dataclass(frozen=True)
class Dialect:
    """The configuration language of another toolkit.

    Attributes:
        name: the name of its module, and the value of ``--dialect``.
        title: its name in messages.
        tables: its key tables, by heading in ``docs/dialects/{name}.md``.
        of_file: translates a file, given also the remaining command-line arguments.
        of_arguments: translates a command line without the program's name; None if not supported.
        programs: file names of the toolkit's programs, to recognize a command line.
        keys_of_files: top-level keys of its files, to recognize a file.
        options: normalized names of its options, to recognize a command line.
    """

    name: str
    title: str
    tables: dict[str, KeyTable]
    of_file: Callable[[Path, Sequence[str]], Translation]
    of_arguments: Callable[[Sequence[str]], Translation] | None = None
    programs: frozenset[str] = field(default_factory=frozenset)
    keys_of_files: frozenset[str] = field(default_factory=frozenset)
    options: frozenset[str] = field(default_factory=frozenset)


def dialects() -> dict[str, Dialect]:
    """All dialects, by name."""
    found = [import_module(f"{__package__}.{name}").DIALECT for name in _MODULES]
    return {one.name: one for one in found}


def dialect_named(name: str) -> Dialect:
    """The dialect ``name``. Raises ConfigError if there is none."""
    known = dialects()
    if name not in known:
        raise ConfigError(f"must be one of {', '.join(known)}", key="--dialect", value=name)
    return known[name]


def dialect_of_file(path: Path, keys: frozenset[str]) -> Dialect:
    """The dialect with the most of the top-level ``keys`` of the file ``path``. Raises ConfigError if no
    dialect has any."""
    scores = {one.name: len(one.keys_of_files & keys) for one in dialects().values()}
    best = max(scores, key=lambda name: scores[name], default=None)
    if best is None or scores[best] == 0:
        if keys & RunConfig.model_fields.keys():
            rule = "is a configuration of this program already: ppfleetx check -c FILE"
            raise ConfigError(rule, place=str(path))
        raise ConfigError(
            f"has no key of {_titles()}; say with --dialect whose it is ({', '.join(scores)})",
            place=str(path),
        )
    return dialects()[best]


def dialect_of_arguments(argv: Sequence[str]) -> tuple[Dialect, list[str]]:
    """Find the dialect of a command line. Returns it and the arguments to pass to its ``of_arguments``.

    These are the whole command line if the launcher has options, otherwise the words after the program.
    """
    refuse_other_models(argv)
    known = [one for one in dialects().values() if one.of_arguments is not None]
    at = next((at for at, text in enumerate(argv) if any(_runs(one, text) for one in known)), None)
    if at is not None:
        known = [one for one in known if _runs(one, argv[at])]
    options = {normal_name(text.partition("=")[0]) for text in argv if text.startswith("--")}
    best = max(known, key=lambda one: _score(one, known, options))
    if at is None and not best.options & options:
        raise ConfigError(
            f"the arguments after -- are not a command line of {_titles()}; name the toolkit with --dialect"
        )
    if at is None:
        at = next((at for at, text in enumerate(argv) if text.startswith("--")), len(argv)) - 1
    launched = any(text.startswith("-") for text in argv[: max(at, 0)])
    return best, list(argv if launched else argv[at + 1 :])


def _runs(dialect: Dialect, text: str) -> bool:
    return Path(text).name in dialect.programs


def _score(dialect: Dialect, others: Sequence[Dialect], options: set[str]) -> tuple[int, int]:
    """The number of given options that only this dialect has, and the number that it has."""
    theirs = frozenset().union(*(one.options for one in others if one is not dialect))
    mine = dialect.options & options
    return len(mine - theirs), len(mine)


def _titles() -> str:
    return ", ".join(one.title for one in dialects().values())
