"""The toolkits whose configurations ppfleetx translates, called dialects, and how to recognize their files
and command lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.dialects.key_tables import KeyTable
from ppfleetx.dialects.translation import Translation
from ppfleetx.dialects.user_options import normal_name, refuse_other_models

_MODULES: tuple[str, ...] = (
    "mindformers.dialect",
    "megatron.dialect",
    "mindspeed.dialect",
    "paddleformers.dialect",
)
"""Modules that define a ``DIALECT``. If several dialects match a file or a command line equally well, the
first of them in this list is used."""


@dataclass(frozen=True)
class Dialect:
    """The configuration language of another toolkit, such as Megatron's command line, with its translation.

    Attributes:
        name: the value of ``--dialect``, and the name of the package in ``ppfleetx/dialects``.
        title: the toolkit's name in messages.
        tables: the key tables of the toolkit's options, by their headings in ``docs/dialects/{name}.md``.
        of_file: translates a file, given its path and further command-line arguments.
        of_arguments: translates a command line.
        programs: file names of the toolkit's programs, to recognize a command line.
        keys_of_files: top-level keys of the toolkit's files, to recognize a file.
        options: names of the toolkit's options (lower case, with underscores), to recognize a command line.
    """

    name: str
    title: str
    tables: dict[str, KeyTable]
    of_file: Callable[[Path, Sequence[str]], Translation]
    of_arguments: Callable[[Sequence[str]], Translation]
    programs: frozenset[str]
    keys_of_files: frozenset[str]
    options: frozenset[str]


def dialects() -> dict[str, Dialect]:
    """Return all dialects that ppfleetx translates, by name."""
    found = [import_module(f"{__package__}.{name}").DIALECT for name in _MODULES]
    return {one.name: one for one in found}


def dialect_named(name: str) -> Dialect:
    """Return the dialect called ``name``. Raises ConfigError if there is none."""
    known = dialects()
    if name not in known:
        raise ConfigError(f"must be one of {', '.join(known)}", key="--dialect", value=name)
    return known[name]


def dialect_of_file(path: Path, keys: frozenset[str]) -> Dialect:
    """Return the dialect that has the most keys in common with ``keys``, the top-level keys of the file
    ``path``. Raises ConfigError if no dialect has any of them."""
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
    """Return the dialect of the command line ``argv``, and the arguments for the dialect's ``of_arguments``.
    Raises ConfigError if ``argv`` has neither a program nor an option of any dialect."""
    refuse_other_models(argv)
    known = list(dialects().values())
    at = next((at for at, text in enumerate(argv) if any(_runs(one, text) for one in known)), None)
    if at is not None:
        known = [one for one in known if _runs(one, argv[at])]
    options = {normal_name(text.partition("=")[0]) for text in argv if text.startswith("--")}
    best = max(known, key=lambda one: _fit(one, known, options))
    if at is None and not best.options & options:
        raise ConfigError(
            f"the arguments after -- are not a command line of {_titles()}; name the toolkit with --dialect"
        )
    if at is None:
        at = next((at for at, text in enumerate(argv) if text.startswith("--")), len(argv)) - 1
    # Keep the options of a launcher, because they give the number of processes.
    launched = any(text.startswith("-") for text in argv[: max(at, 0)])
    return best, list(argv if launched else argv[at + 1 :])


def _runs(dialect: Dialect, text: str) -> bool:
    return Path(text).name in dialect.programs


def _fit(dialect: Dialect, others: Sequence[Dialect], options: set[str]) -> tuple[int, int]:
    """Return how well ``dialect`` fits the user's ``options``, as two counts: the options that only
    ``dialect`` knows, and all options that it knows."""
    theirs = frozenset().union(*(one.options for one in others if one is not dialect))
    mine = dialect.options & options
    return len(mine - theirs), len(mine)


def _titles() -> str:
    return ", ".join(one.title for one in dialects().values())
