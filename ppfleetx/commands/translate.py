"""The verb ``translate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.commands.options import Command, option, positional
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_tree
from ppfleetx.config.reading.parse import read_yaml
from ppfleetx.dialects.registry import dialect_named, dialect_of_arguments, dialect_of_file
from ppfleetx.dialects.translation import Translation
from ppfleetx.utils.files import atomic_write

_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True)
class Translate(Command):
    """Print a configuration or a command line of another toolkit as a configuration of this one.

    Each key of the result says in a comment which file, line and key of the other toolkit it came from. The
    toolkit is recognised by its keys or options. docs/dialects/ has a page for each.
    """

    examples = """\
examples:
  ppfleetx translate projects/mindformers/configs/gpt2/run_gpt2.yaml
  ppfleetx translate run_gpt2.yaml --to ours.yaml
  ppfleetx translate --to ours.yaml -- run_mindformer.py --config run_gpt2.yaml --epochs 1
"""
    words: tuple[str, ...] = positional(
        "FILE | -- ARGUMENTS",
        "a configuration, further arguments of its program after --; or a whole command line after --",
        default=(),
    )
    dialect: str | None = option("the toolkit, if it is not recognised", metavar="NAME")
    to: str | None = option("write there instead of to standard output", metavar="OUT.yaml")

    def run(self) -> None:
        """Print the translation, or write it."""
        words, to = list(self.words), self.to
        if to is None and words[-2:-1] == ["--to"]:  # at the end of a command line
            *words, _, to = words
        result = translation_of(words, self.dialect)
        load_tree(result.tree(), result.warnings)  # what is printed is valid
        print(result.yaml().rstrip("\n") if to is None else _write(Path(to), result.yaml()))


def _write(path: Path, text: str) -> str:
    if path.exists():
        raise ConfigError("is there already; nothing is overwritten", key="--to", value=str(path))
    try:
        with atomic_write(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="--to", value=str(path)) from error
    return f"written: {path}"


def translation_of(words: Sequence[str], dialect: str | None = None) -> Translation:
    """The translation of a file with further arguments, or of a command line.

    Args:
        words: the file's name comes first if it is one; else they are a command line.
        dialect: name of the toolkit; None: recognised by the keys or options.

    Raises:
        ConfigError: no toolkit knows the file, or its arguments are wrong.
    """
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
    if known.of_arguments is None:
        raise ConfigError(f"{known.title} has no command line; name its file", key="FILE", value=first)
    return known.of_arguments(argv)
