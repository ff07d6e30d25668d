"""Read options from another toolkit's file or command line, and remove the launcher from a command line."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.parse import parse_yaml, read_text, shown_path
from ppfleetx.config.reading.tree import Node, is_index, plain_scalar, plain_value


@dataclass(frozen=True)
class UserOption:
    """One option that the user gave to another toolkit, with its value.

    Attributes:
        key: the dotted name as the user wrote it, such as ``--num-layers`` or ``callbacks.0.type``.
        value: the plain Python value; None if the key has no value.
        place: where the user wrote the option: ``file:line`` or ``argument 3``.
        text: the value as the user wrote it; None if the value is not a plain scalar.
    """

    key: str
    value: Any
    place: str
    text: str | None = None

    @property
    def origin(self) -> str:
        return f"{self.place}, {self.key}"

    def error(self, rule: str) -> ConfigError:
        """Return a ConfigError about this option. The message shows the option's value and where it was
        written."""
        return ConfigError(rule, key=self.key, value=self.value, place=self.place)


def given_in(tree: Node, prefix: str = "") -> Iterator[UserOption]:
    """Yield all values of the configuration tree ``tree`` with their dotted keys, in file order. Each key
    gets the prefix ``prefix``. Mappings and lists of mappings are flattened; any other list is one value. An
    empty mapping becomes None."""
    for key, node in tree.value.items():
        name = f"{prefix}{key}"
        if isinstance(node.value, dict) and node.value:
            yield from given_in(node, f"{name}.")
        elif isinstance(node.value, list) and any(isinstance(item.value, dict) for item in node.value):
            for index, item in enumerate(node.value):
                if isinstance(item.value, dict):
                    yield from given_in(item, f"{name}.{index}.")
                else:
                    yield UserOption(f"{name}.{index}", plain_value(item), item.place, item.text)
        else:
            value = None if node.value == {} else plain_value(node)
            yield UserOption(name, value, node.place, node.text)


def given_in_file(path: Path, prefix: str = "", *, named: UserOption | None = None) -> Iterator[UserOption]:
    """Yield all values in a YAML or JSON file with their dotted keys. Each key gets the prefix ``prefix``.
    ``named`` is the user's option that names the file, for error messages."""
    entry = {} if named is None else {"key": named.key, "value": str(named.value), "place": named.place}
    # JSON may be indented with tabs, which YAML forbids. JSON strings cannot contain raw tabs.
    text = read_text(path, **entry).replace("\t", " ")
    tree = parse_yaml(text, shown_path(path), with_lines=True, is_ours=False)
    if tree is None or not isinstance(tree.value, dict):
        raise ConfigError("is not a mapping of keys", **(entry or {"place": shown_path(path)}))
    yield from given_in(tree, prefix)


def given_arguments(
    argv: Sequence[str],
    flags: Collection[str],
    many: Collection[str] = (),
    known: Collection[str] | None = None,
    *,
    first: int = 1,
) -> Iterator[UserOption]:
    """Yield the options of a command line: ``--name value``, ``--name=value``, or a flag without a value.
    Raises ConfigError if an option lacks its value, or is given twice with different values.

    Args:
        argv: the arguments, without the program's name.
        flags: names of flags, in the form of :func:`normal_name`. A flag becomes True.
        many: names of options that take all words up to the next option, as a list.
        known: names of the options that need a value. Any other option without a value counts as a flag.
            None: all options except ``flags`` need a value.
        first: the position of ``argv[0]`` on the whole command line, for the positions in messages.
    """
    seen: dict[str, UserOption] = {}
    position = 0
    while position < len(argv):
        written, place = argv[position], f"argument {position + first}"
        if not written.startswith("--") or written == "--":
            raise ConfigError("is not an option; options begin with --", key=written or "''", place=place)
        name, equals, inline = written.partition("=")
        following = list(takewhile(lambda text: not text.startswith("--"), argv[position + 1 :]))
        position += 1
        normal = normal_name(name)
        if normal in flags and not equals:
            one = UserOption(name, True, place)
        elif normal in many and not equals:
            position += len(following)
            one = UserOption(name, [plain_scalar(text) for text in following], place)
        else:
            is_flag = not equals and not following
            if is_flag and (known is None or normal in known):
                raise ConfigError("needs a value", key=name, place=place)
            text = inline if equals else "true" if is_flag else following[0]
            position += not equals and not is_flag
            one = UserOption(name, plain_scalar(text), place, text)
        earlier = seen.setdefault(normal, one)
        if earlier.value != one.value:
            raise one.error(f"is already given ({earlier.place})")
        if earlier is one:
            yield one


def weighted_corpora(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Split the words of a corpus option into corpus names and weights: ``0.3 a 0.7 b`` gives the names
    ``["a", "b"]`` and the weights ``[0.3, 0.7]``. If the words are not pairs of a number and a name, all
    words are names, and the weights are None."""
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        weights = []
    return (list(words[1::2]), weights) if weights and len(words) % 2 == 0 else (list(words), None)


def normal_name(name: str) -> str:
    """Return the name of an option in lower case, with underscores and without leading dashes, such as
    ``num_layers`` for ``--num-layers``."""
    return name.lstrip("-").replace("-", "_").lower()


_WORLD = ("PADDLE_TRAINERS_NUM", "WORLD_SIZE")
_PROCESSES = ("nproc_per_node", "num_gpus", "local_worker_num")
_DEVICES = ("gpus", "devices", "xpus", "npus")
_NODES = ("nnodes", "num_nodes")


def without_launcher(argv: Sequence[str]) -> tuple[int | None, list[str], int]:
    """Remove a launcher such as ``torchrun`` and the program from a command line: everything up to and
    including the first ``*.py``. Without a ``*.py``, nothing is removed.

    Returns:
        The number of processes that the launcher starts (None if unknown), the program's arguments, and the
        position of the first of these arguments on the command line.
    """
    refuse_other_models(argv)
    program = next((at for at, text in enumerate(argv) if text.endswith(".py")), None)
    if program is None:
        return None, list(argv), 1
    before = list(argv[:program])
    processes = nodes = None
    for at, text in enumerate(before):
        name, equals, value = text.partition("=")
        value = value if equals else "".join(before[at + 1 : at + 2])
        option = normal_name(name) if text.startswith("-") else ""
        if option == "worker_num" and is_index(value):  # msrun: the processes on all hosts
            return int(value), list(argv[program + 1 :]), program + 2
        if option in _PROCESSES:
            processes = _count(name, value)
        elif option in _DEVICES:
            processes = len(value.split(","))
        elif option in _NODES:
            nodes = _count(name, value)
    is_given = processes is not None or nodes is not None
    world = (processes or 1) * (nodes or 1) if is_given else None
    return world, list(argv[program + 1 :]), program + 2


def refuse_other_models(argv: Sequence[str]) -> None:
    """Raise ConfigError if the command line runs a Megatron program for models other than GPT."""
    for text in argv:
        name = text.rpartition("/")[2]
        if name.startswith("pretrain_") and name.endswith(".py") and name != "pretrain_gpt.py":
            raise ConfigError("trains another kind of model; only pretrain_gpt.py is translated", key=name)


def _count(name: str, value: str) -> int:
    if not is_index(value) or int(value) < 1:
        raise ConfigError("must be a number of at least 1", key=name, value=value, place="the launcher")
    return int(value)


def world_of(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes of the job, as launchers set it in environment variables. Returns None
    if no such variable is set."""
    for name in _WORLD:
        text = environ.get(name, "")
        if is_index(text) and int(text) > 0:
            return int(text)
    return None
