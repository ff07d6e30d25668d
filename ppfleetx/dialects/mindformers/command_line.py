"""Read the command line of ``run_mindformer.py``: a YAML file and its base files, flags, and
``--options``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.reading.parse import key_problem, parse_yaml, read_yaml
from ppfleetx.config.reading.tree import Node, file_names, merge, put
from ppfleetx.dialects.key_tables import Key, KeyTable, Kind
from ppfleetx.dialects.user_options import UserOption, given_arguments, normal_name

RUN_MODES = ("train", "finetune", "eval", "predict")

_FIRST = {
    "device_id": "context.device_id",
    "device_target": "context.device_target",
    "mode": "context.mode",
    "run_mode": "run_mode",
    "seed": "seed",
    "use_parallel": "use_parallel",
    "load_checkpoint": "resume_or_finetune_checkpoint",
    "profile": "profile",
}
"""Maps each flag that ``--options`` overrides to the key that the flag sets."""

_LAST = {
    "epochs": "runner_config.epochs",
    "batch_size": "runner_config.batch_size",
    "sink_mode": "runner_config.sink_mode",
    "predict_data": "input_data",
    # flags of versions after v0.3
    "train_dataset_dir": "train_dataset.data_loader.dataset_dir",
    "eval_dataset_dir": "eval_dataset.data_loader.dataset_dir",
    "gradient_accumulation_steps": "runner_config.gradient_accumulation_steps",
    "output_dir": "output_dir",
    "do_eval": "do_eval",
    "resume_training": "resume_training",
    "auto_trans_ckpt": "auto_trans_ckpt",
    "only_save_strategy": "only_save_strategy",
    "src_strategy_path_or_dir": "src_strategy_path_or_dir",
    "remote_save_url": "remote_save_url",
}
"""Maps each flag that overrides ``--options`` to the key that the flag sets."""

_OF_DATASET = {"dataset_dir": "data_loader.dataset_dir", "num_samples": "data_loader.num_samples"}
"""Maps flags to the keys that they set in ``train_dataset``, or in ``eval_dataset`` if the run mode is
eval."""


def _flag(name: str) -> Key:
    target = {**_FIRST, **_LAST}.get(name)
    if target is None:
        own = _OF_DATASET[name]
        target = f"train_dataset.{own} or eval_dataset.{own}, depending on the run mode"
    return Key(f"--{name}", Kind.MAPPED, says=f"sets {target}")


FLAGS = KeyTable(
    [
        Key("--config", Kind.MAPPED, says="the YAML file; required"),
        *map(_flag, (*_FIRST, *_LAST, *_OF_DATASET)),
        Key(
            "--options",
            Kind.MAPPED,
            says="block.key=value ...; values are parsed as YAML: True is true, [1,2] is a list",
        ),
        Key(
            "--check",
            Kind.MAPPED,
            says="added by ppfleetx: print plan, parameters and batch sizes; run nothing",
        ),
        Key("--dataset_id", Kind.UNUSED, says="only for ModelArts"),
        Key("--help", Kind.FIXED, says="prints the flags"),
    ],
    normal=lambda name: f"--{normal_name(name)}",
)


@dataclass(frozen=True)
class CommandLine:
    """A command line of ``run_mindformer.py``.

    Attributes:
        tree: the configuration, with all flags and ``--options`` applied.
        path: the file that ``--config`` names.
        checks: whether ``--check`` was given. The program then prints a report and runs nothing.
        unused: flags that were given but have no meaning in ppfleetx.
    """

    tree: Node
    path: Path
    checks: bool
    unused: tuple[UserOption, ...]


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read the arguments of ``run_mindformer.py`` and the file that ``--config`` names."""
    given: dict[str, UserOption] = {}
    for one in given_arguments(argv, flags={"check"}, many={"options"}):
        if FLAGS.find(one.key) is None:
            raise ConfigError(
                "run_mindformer.py has no such flag.",
                key=one.key,
                place=one.place,
                hint=FLAGS.nearest(one.key),
            )
        given[normal_name(one.key)] = one
    if "config" not in given:
        raise ConfigError("is needed: the YAML file of the run", key="--config")
    one = given["config"]
    path = Path(str(one.value) if one.text is None else one.text)
    tree = read_with_bases(path)
    _put_flags(tree, given, _FIRST)
    for text in _options(given.get("options")):
        put(tree, *option(text, given["options"].place))
    mode = tree.value.get("run_mode")
    block = "eval_dataset" if mode is not None and mode.value == "eval" else "train_dataset"
    _put_flags(tree, given, {name: f"{block}.{key}" for name, key in _OF_DATASET.items()})
    _put_flags(tree, given, _LAST)
    left_out = tuple(given[name] for name in ("dataset_id",) if name in given)
    return CommandLine(tree, path, given["check"].value is True if "check" in given else False, left_out)


def _put_flags(tree: Node, given: dict[str, UserOption], keys: dict[str, str]) -> None:
    for name, key in keys.items():
        one = given.get(name)
        if one is not None:
            put(tree, key.split("."), Node(one.value, f"{one.place}, {one.key}", one.text))


def _options(one: UserOption | None) -> list[str]:
    """Return the assignments ``key=value`` in ``--options a=1 b=2`` or ``--options=a=1``."""
    if one is None:
        return []
    return [str(text) for text in one.value] if isinstance(one.value, list) else [one.text or str(one.value)]


def usage() -> str:
    rows = [f"  {key.name:20} {key.says}" for key in FLAGS.keys]
    return "\n".join(["usage: run_mindformer.py --config FILE [--flag VALUE ...]", "", *rows])


def read_with_bases(path: Path, chain: tuple[str, ...] = (), **entry: str) -> Node:
    """Read a configuration file and the files in its ``base_config``, as in MindFormers v0.3. Values in the
    file override values in its base files. Raises ConfigError if the files include each other.

    Args:
        chain: paths of the files that include this one, to find cycles.
        entry: where another file names this file, for error messages: the ``key``, its ``value``, and the
            ``place`` (file and line). Empty if no other file does.
    """
    here = os.path.realpath(path)
    if here in chain:
        raise ConfigError("the base files include each other", **entry)
    tree = read_yaml(path, is_ours=False, **entry)
    bases = tree.value.pop("base_config", None)
    below = Node({}, tree.place)
    for item in file_names(bases, "base_config"):
        about = {"key": "base_config", "value": item.value, "place": item.place}
        base = read_with_bases(path.parent / item.value, (*chain, here), **about)
        # A top-level block of a base file replaces the same block of earlier base files entirely.
        below.value.update(base.value)
    return merge(below, tree)


def option(text: str, place: str) -> tuple[list[str], Node]:
    """Parse an argument of ``--options``, such as ``a.b=1``. Returns the key as a list (``["a", "b"]``) and
    the value, parsed as YAML."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    problem = next(filter(None, map(key_problem, path)), None)
    if not equals or problem:
        rule = problem or f"{shown(text)} is not of the form block.key=value"
        raise ConfigError(rule, key="--options", place=place)
    value = value.strip()
    if value.startswith("(") and value.endswith(")"):  # MindFormers also accepts tuples as lists
        value = f"[{value[1:-1]}]"
    try:
        node = parse_yaml(value, place)
    except ConfigError as error:
        raise ConfigError(f"the value {error.rule}", key=key.strip(), value=value, place=place) from None
    return path, node or Node(None, place, "")
