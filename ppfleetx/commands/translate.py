"""Implement ``ppfleetx translate``, which converts another toolkit's configuration to ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_tree
from ppfleetx.config.reading.parse import read_yaml
from ppfleetx.dialects.registry import dialect_named, dialect_of_arguments, dialect_of_file
from ppfleetx.dialects.translation import Translation
from ppfleetx.utils.output_files import atomic_write, refuse_as_new_file, writing

if TYPE_CHECKING:
    from ppfleetx.commands.train_verbs import Translate

_FILES = (".yaml", ".yml", ".json")


def translate(options: Translate) -> None:
    """Translate another toolkit's configuration, and print the result or write it to the file ``--to``."""
    words, to = list(options.words), options.to
    if to is None and words[-2:-1] == ["--to"]:  # given at the end of the other toolkit's command line
        *words, _, to = words
    result = translation_of(words, options.dialect)
    load_tree(result.tree(), result.warnings)  # raises if the result is not valid
    if to is None:
        print(result.yaml(), end="")
        return
    refuse_as_new_file(Path(to), "--to")
    with writing("--to", to), atomic_write(to, "w") as file:
        file.write(result.yaml())
    print(f"written: {to}")


def translation_of(words: Sequence[str], dialect: str | None = None) -> Translation:
    """Translate another toolkit's configuration. ``words`` are the name of its file and further arguments,
    or a whole command line. ``dialect`` names the toolkit; None: recognize it."""
    if not words:
        raise ConfigError("name a file, or give a command line after --", key="FILE")
    first, *rest = words
    if first.endswith(_FILES):
        path = Path(first)
        if dialect:
            return dialect_named(dialect).of_file(path, rest)
        keys = frozenset(read_yaml(path, is_ours=False).value)
        return dialect_of_file(path, keys).of_file(path, rest)
    if not rest and Path(first).suffix not in (".py", ".sh"):
        kind = "is a directory" if Path(first).is_dir() else "there is no such file"
        if Path(first).is_file():
            kind = f"the name of a configuration ends in {', '.join(_FILES)}"
        raise ConfigError(f"{kind}; a command line comes after --", key="FILE", value=first)
    known, argv = (dialect_named(dialect), list(words)) if dialect else dialect_of_arguments(words)
    return known.of_arguments(argv)
