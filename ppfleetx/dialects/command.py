"""``ppfleetx translate``: a file or a command line of another toolkit, printed as a native configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_tree
from ppfleetx.config.reading.parse import Budget, read_yaml
from ppfleetx.dialects.registry import named, of_arguments, of_file
from ppfleetx.dialects.translation import Translation
from ppfleetx.utils.files import atomic_write

DESCRIPTION = """Print a configuration or a command line of another toolkit as a configuration of this one.

  translate FILE [--to OUT.yaml]
  translate FILE [--to OUT.yaml] -- ARGUMENTS OF THE TOOLKIT'S PROGRAM
  translate [--to OUT.yaml] -- [PROGRAM] --its-arguments ..."""


def add_translate_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes before ``--``; what stands behind it is not parsed here."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="a configuration of the other toolkit")
    parser.add_argument("--dialect", metavar="NAME", help="whose it is, where it cannot be told")
    parser.add_argument("--to", metavar="OUT.yaml", help="write there, and not to standard output")


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The arguments before ``--``, and those behind it; None: there is no ``--``."""
    argv = list(argv)
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def run_translate(args: argparse.Namespace, rest: Sequence[str] | None) -> str:
    """What the command prints: the native YAML, or where it has been written.

    Raises:
        ConfigError: nothing or something unknown to translate, a translation that is no valid configuration,
            or a file in the way.
    """
    result = translation_of(args.file, rest, args.dialect)
    load_tree(result.tree(), result.warnings)  # what is printed is valid
    if args.to is None:
        return result.yaml().rstrip("\n")
    path = Path(args.to)
    if path.exists():
        raise ConfigError("is there already; nothing is overwritten", key="--to", value=args.to)
    try:
        with atomic_write(path, "w") as file:
            file.write(result.yaml())
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="--to", value=args.to) from error
    return f"written: {path}"


def translation_of(file: str | None, rest: Sequence[str] | None, dialect: str | None = None) -> Translation:
    """The translation of a file, or of a command line."""
    if file is None and not rest:
        raise ConfigError("name a file, or give a command line after --", key="FILE")
    if file is None:
        if dialect is None:
            known, argv = of_arguments(rest)
        else:
            known, argv = named(dialect), list(rest)
        if known.of_arguments is None:
            raise ConfigError(f"{known.title} has no command line; name its file", key="FILE")
        return known.of_arguments(argv)
    path = Path(file)
    known = named(dialect) if dialect else of_file(path, frozenset(read_yaml(path, Budget()).value))
    return known.of_file(path, list(rest or ()))
