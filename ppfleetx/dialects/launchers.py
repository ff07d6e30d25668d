"""Launchers in front of a program: how many processes they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.tree import is_index
from ppfleetx.dialects.given import normal_name

_WORLD = ("PADDLE_TRAINERS_NUM", "WORLD_SIZE")
_PROCESSES = ("nproc_per_node", "num_gpus", "local_worker_num")
_DEVICES = ("gpus", "devices", "xpus", "npus")
_NODES = ("nnodes", "num_nodes")


def without_launcher(argv: Sequence[str]) -> tuple[int | None, list[str], int]:
    """Of a command line: the processes that a launcher before ``*.py`` starts, the arguments behind that, and
    the number of the first of them."""
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
        if option == "worker_num" and is_index(value):  # msrun: of all hosts
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
    """Raise where a command line is of a program of Megatron's that trains another kind of model than GPT."""
    for text in argv:
        name = text.rpartition("/")[2]
        if name.startswith("pretrain_") and name.endswith(".py") and name != "pretrain_gpt.py":
            raise ConfigError("trains another kind of model; pretrain_gpt.py is translated", key=name)


def _count(name: str, value: str) -> int:
    if not is_index(value) or int(value) < 1:
        raise ConfigError("must be a number of at least 1", key=name, value=value, place="the launcher")
    return int(value)


def world_of(environ: Mapping[str, str]) -> int | None:
    """Processes of the job as its launcher tells its ranks; None: there is none."""
    for name in _WORLD:
        text = environ.get(name, "")
        if is_index(text) and int(text) > 0:
            return int(text)
    return None
