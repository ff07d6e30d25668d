"""Translation of Megatron-LM and Megatron-DeepSpeed: the command line of ``pretrain_gpt.py``, or a YAML file
of its arguments.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.parse import read_yaml, shown_path
from ppfleetx.dialects.key_tables import KeyTable, read_file, tables_of
from ppfleetx.dialects.megatron import network_rules, training_rules
from ppfleetx.dialects.megatron.expert_rules import experts
from ppfleetx.dialects.megatron.parallel_rules import plan, recomputation
from ppfleetx.dialects.registry import Dialect
from ppfleetx.dialects.translation import Rule, Translation, translate
from ppfleetx.dialects.user_options import (
    UserOption,
    given_arguments,
    given_in,
    given_in_file,
    normal_name,
    without_launcher,
    world_of,
)

TITLE = "Megatron"
_DEEPSPEED = "deepspeed_config"
_FILE = read_file("megatron")
FLAGS = frozenset(_FILE["flags"].split())
"""Names of flags, which take no value and are true if given."""
MANY = frozenset(_FILE["many"].split())
"""Names of options that take a list: all words up to the next option."""
TABLES = tables_of(_FILE, {"deepspeed": f"{_DEEPSPEED}."})
ALL_KEYS = KeyTable([key for keys in TABLES.values() for key in keys], normal_name)
OPTIONS = frozenset(key.name for name, keys in TABLES.items() if name != "deepspeed" for key in keys)


RULES: tuple[Rule, ...] = (
    network_rules.required,
    network_rules.network,
    experts,
    network_rules.vocabulary,
    network_rules.data,
    training_rules.batches,
    training_rules.lengths,
    training_rules.device,
    training_rules.precision,
    training_rules.optimizer,
    training_rules.schedule,
    training_rules.checkpoints,
    training_rules.profiler,
    partial(training_rules.logs, callback="megatron_log", interval=100),
    plan,
    recomputation,
)
"""The rules for options that depend on each other. Later rules use the results of earlier ones."""


def of_arguments(argv: Sequence[str], world_size: int | None = None) -> Translation:
    """Translate a Megatron command line, with or without a launcher before ``pretrain_gpt.py``.
    ``world_size`` is the number of processes; if it is None, the launcher's options or environment variables
    give the number."""
    world, argv, first = without_launcher(argv)
    given = list(given_arguments(argv, FLAGS, MANY, OPTIONS, first=first))
    return of_given(given, network_rules.COMMAND_LINE, world_size or world or world_of(os.environ))


def of_given(given: Iterable[UserOption], place: str, world_size: int | None) -> Translation:
    """Translate parsed Megatron arguments. If the arguments name a DeepSpeed configuration file
    (``deepspeed_config``), the options in that file are translated too. ``place`` is the file or command line
    of the arguments, for messages."""
    given = list(given)
    files = [one for one in given if normal_name(one.key) == _DEEPSPEED and one.value is not None]
    for one in files:
        given += given_in_file(Path(str(one.value)), f"{_DEEPSPEED}.", named=one)
    return translate(TITLE, place, given, ALL_KEYS, RULES, world_size)


def of_file(path: Path, argv: Sequence[str]) -> Translation:
    """Translate a YAML file of Megatron arguments (``tensor_model_parallel_size: 2``), together with the
    arguments in ``argv``.
    """
    tree = read_yaml(path, is_ours=False)
    arguments = tree.value.get("MODEL_ARGS")
    if arguments is not None and not isinstance(arguments.value, dict):
        raise ConfigError("must be a mapping of arguments", key="MODEL_ARGS", place=arguments.place)
    given = [*given_in(arguments or tree), *given_arguments(argv, FLAGS, MANY, OPTIONS)]
    result = of_given(given, shown_path(path), world_of(os.environ))
    others = [key for key in tree.value if key != "MODEL_ARGS"] if arguments else []
    if others:
        result.notes.append(f"MODEL_ARGS is read; {', '.join(others)}: of the program around it")
    return result


DIALECT = Dialect(
    name="megatron",
    title=TITLE,
    tables={name: KeyTable(keys, normal_name) for name, keys in TABLES.items()},
    of_file=of_file,
    of_arguments=of_arguments,
    programs=frozenset({"pretrain_gpt.py"}),
    keys_of_files=OPTIONS | {"MODEL_ARGS"},
    options=OPTIONS,
)
