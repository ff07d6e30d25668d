"""MindSpeed-Core-MS: the YAML of ``pretrain_gpt.py``, with Megatron's arguments after it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.reading.files import shown_path
from ppfleetx.config.reading.parse import read_yaml
from ppfleetx.dialects.given import Given, given_arguments, given_in, normal_name
from ppfleetx.dialects.launchers import without_launcher, world_of
from ppfleetx.dialects.megatron import network_rules, run_rules
from ppfleetx.dialects.megatron.dialect import FLAGS, MANY
from ppfleetx.dialects.megatron.expert_rules import experts
from ppfleetx.dialects.megatron.plan_rules import plan_rule, recomputation
from ppfleetx.dialects.mindspeed import rules
from ppfleetx.dialects.mindspeed.keys import ALIASES, TABLE, documented, plain
from ppfleetx.dialects.registry import Dialect
from ppfleetx.dialects.translate import Rule, translate
from ppfleetx.dialects.translation import Translation

TITLE = "MindSpeed-Core-MS"
FILE_OPTIONS = ("yaml_cfg", "config_path", "config")
_NO_EVALUATION = "eval_interval is not given: no evaluation"


def of_file(path: Path, argv: Sequence[str] = (), world_size: int | None = None) -> Translation:
    """The translation of a YAML file, with arguments of Megatron's that replace what it says.

    Args:
        world_size: processes of the job; None: from the launcher's environment, if there is one.

    Raises:
        ConfigError: what cannot be translated, with the line or the argument.
    """
    tree = read_yaml(path, is_ours=False)
    given = [_without_empty_text(one) for one in given_in(tree)]
    _refuse_two_answers(given)
    given += given_arguments(argv, FLAGS, MANY)
    given += _implied(given)
    return translate(TITLE, shown_path(path), given, TABLE, _rules(world_size or world_of(os.environ)))


def of_arguments(argv: Sequence[str], world_size: int | None = None) -> Translation:
    """The translation of a command line, ``[msrun ...] pretrain_gpt.py --yaml-cfg FILE [ARGUMENTS]``."""
    world, argv, _ = without_launcher(argv)
    path, rest = file_of(argv)
    if path is None:
        raise ConfigError("names no file; give --yaml-cfg FILE", key="--yaml-cfg", place="the command line")
    return of_file(path, rest, world_size or world)


def file_of(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that ``--yaml-cfg`` names, and the other arguments."""
    path, rest, words = None, [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--") and normal_name(name) in FILE_OPTIONS:
            path = Path(value if equals else next(words, ""))
        else:
            rest.append(word)
    return path, rest


def _rules(world_size: int | None) -> list[Rule]:
    return [
        network_rules.required,
        rules.network,
        network_rules.network,
        experts,
        network_rules.vocabulary,
        network_rules.data,
        run_rules.batches,
        run_rules.device,
        run_rules.precision,
        rules.precision,
        run_rules.optimizer,
        run_rules.schedule,
        rules.checkpoints,
        run_rules.profiler,
        run_rules.defaults_rule("mindspeed_log", log_interval=1),
        plan_rule(world_size),
        recomputation,
    ]


def _refuse_two_answers(given: Sequence[Given]) -> None:
    """Raise where a file says the same thing under two names, and not alike."""
    seen: dict[str, Given] = {}
    for one in given:
        if one.value is None:
            continue
        earlier = seen.setdefault(ALIASES.get(plain(one.key), plain(one.key)), one)
        if earlier.value != one.value:
            raise ConfigError(
                f"contradicts {earlier.key} = {shown(earlier.value)} ({earlier.place}); give one of them",
                key=one.key,
                value=one.value,
                place=one.place,
            )


def _without_empty_text(one: Given) -> Given:
    """An empty text is how its files leave a path open."""
    return replace(one, value=None) if isinstance(one.value, str) and not one.value.strip() else one


def _implied(given: list[Given]) -> Iterator[Given]:
    """What follows from a key that is given, or from one that is not."""
    names = {ALIASES.get(plain(one.key), normal_name(one.key)): one for one in given if one.value is not None}
    if "seq_length" not in names and "max_position_embeddings" in names:
        one = names["max_position_embeddings"]
        yield replace(one, key="seq_length", place=f"{one.place}, {one.key}")
    if "eval_interval" not in names and "eval_iters" not in names:
        yield Given("eval_iters", 0, _NO_EVALUATION)


DIALECT = Dialect(
    name="mindspeed",
    title=TITLE,
    tables=documented(),
    of_file=of_file,
    of_arguments=of_arguments,
    programs=frozenset({"msrun", "pretrain_gpt.py"}),
    keys_of_files=frozenset(
        {
            "train_config",
            "accelerate_config",
            "model_config",
            "training_config",
            "optimizer_config",
            "dataset_config",
            "parallel_config",
        }
    ),
    options=frozenset(FILE_OPTIONS),
)
