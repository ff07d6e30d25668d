"""PaddleNLP and PaddleFormers: the YAML or JSON file, or the command line, of their pretraining."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.parse import parse_yaml, read_text, shown_path
from ppfleetx.dialects.given import Given, given_arguments, given_in, without_launcher, world_of
from ppfleetx.dialects.keys import KeyTable, read_file, tables_of
from ppfleetx.dialects.paddleformers import rules
from ppfleetx.dialects.paddleformers.rules import CONFIG
from ppfleetx.dialects.registry import Dialect
from ppfleetx.dialects.translation import Rule, Translation, translate

TITLE = "PaddleFormers"
TABLES = tables_of(read_file("paddleformers"))
TABLE = KeyTable([key for keys in TABLES.values() for key in keys])
_FILES = (".yaml", ".yml", ".json")
_MODEL, _OURS = "model_name_or_path", "config.yaml"


def of_file(path: Path, argv: Sequence[str] = (), world_size: int | None = None) -> Translation:
    """Translate a file, and arguments, which override the file."""
    given = list(_read(path, ""))
    return _translated([*given, *_arguments(argv)], shown_path(path), world_size)


def of_arguments(argv: Sequence[str], world_size: int | None = None) -> Translation:
    """Translate a command line: a file or arguments, with or without a launcher and a program before them."""
    world, argv, _ = without_launcher(argv)
    words = (
        [word for word in argv if word not in ("paddleformers-cli", "train")]
        if argv[:1] == ["paddleformers-cli"]
        else list(argv)
    )
    world_size = world_size or world
    if words and words[0].endswith(_FILES):
        return of_file(Path(words[0]), words[1:], world_size)
    return _translated(list(_arguments(words)), "the command line", world_size)


def _translated(given: list[Given], place: str, world_size: int | None) -> Translation:
    named = [one for one in given if one.key.lstrip("-") == _MODEL and one.value is not None]
    if not named:
        raise ConfigError("is missing; the network is that of its config.json", key=_MODEL, place=place)
    network = list(_network(named[-1]))
    ours = {one.key: one for one in network if one.key.startswith(f"{_OURS}.")}
    world_size = world_size or world_of(os.environ)

    def native(run: Translation) -> None:
        for key, one in ours.items():
            run.put(key.removeprefix(f"{_OURS}."), one.value, one)

    plain = [
        replace(one, key=one.key.lstrip("-").replace("-", "_")) if one.key[:2] == "--" else one
        for one in given
    ]
    return translate(TITLE, place, [*network, *plain], TABLE, [native, *_rules(world_size)])


def _rules(world_size: int | None) -> list[Rule]:
    return [
        rules.network,
        rules.balancing,
        rules.batches,
        rules.precision,
        rules.optimizer,
        rules.data,
        rules.checkpoints,
        rules.plan_rule(world_size),
        rules.recomputation,
    ]


def _arguments(argv: Sequence[str]) -> Iterable[Given]:
    """The options of a command line. An option without a value is true."""
    words: list[str] = []
    for at, word in enumerate(argv):
        words.append(word)
        alone = at + 1 == len(argv) or argv[at + 1].startswith("--")
        if word.startswith("--") and "=" not in word and alone:
            words.append("true")
    return given_arguments(words, frozenset())


def _read(path: Path, prefix: str, *, one: Given | None = None) -> Iterator[Given]:
    entry = {} if one is None else {"key": one.key, "value": str(one.value), "place": one.place}
    # JSON may be indented with tabs, which YAML does not allow; its strings contain none.
    text = read_text(path, **entry).replace("\t", " ")
    tree = parse_yaml(text, shown_path(path), with_lines=True, is_ours=False)
    if tree is None or not isinstance(tree.value, dict):
        raise ConfigError("is not a mapping of keys", place=shown_path(path))
    yield from given_in(tree, prefix)


def _network(one: Given) -> Iterator[Given]:
    """Read the keys of the network from the directory that ``model_name_or_path`` names."""
    directory = Path(str(one.value))
    if os.path.isfile(directory / _OURS):  # noqa: PTH113 - Path.is_file raises for names that no file can have
        keys = _read(directory / _OURS, f"{_OURS}.", one=one)
        yield from (key for key in keys if key.key.startswith(f"{_OURS}.Model.") and key.value is not None)
    elif os.path.isfile(directory / CONFIG):  # noqa: PTH113
        yield from _read(directory / CONFIG, f"{CONFIG}.", one=one)
    else:
        raise ConfigError(
            f"is not a directory with {CONFIG} here. Nothing is downloaded: take the files of the model to a "
            "directory and name that",
            key=one.key,
            value=one.value,
            place=one.place,
        )


DIALECT = Dialect(
    name="paddleformers",
    title=TITLE,
    tables={name: KeyTable(keys) for name, keys in TABLES.items()},
    of_file=of_file,
    of_arguments=of_arguments,
    programs=frozenset({"run_pretrain.py", "paddleformers-cli"}),
    keys_of_files=frozenset(key.name for group in TABLES.values() for key in group if "." not in key.name),
    options=frozenset(
        {
            "per_device_train_batch_size",
            "tensor_parallel_degree",
            "sharding_parallel_size",
            _MODEL,
            "input_dir",
        }
    ),
)
