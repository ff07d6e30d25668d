"""Translation of MindSpeed-Core-MS: the YAML file of ``pretrain_gpt.py``, and Megatron arguments after it on
the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.reading.parse import read_yaml, shown_path
from ppfleetx.dialects.key_tables import Key, KeyTable, nearest_names, read_file, tables_of
from ppfleetx.dialects.megatron import network_rules, training_rules
from ppfleetx.dialects.megatron.dialect import ALL_KEYS, FLAGS, MANY, TABLES
from ppfleetx.dialects.megatron.expert_rules import experts
from ppfleetx.dialects.megatron.network_rules import TENSOR
from ppfleetx.dialects.megatron.parallel_rules import plan, recomputation
from ppfleetx.dialects.registry import Dialect
from ppfleetx.dialects.translation import Rule, Translation, translate
from ppfleetx.dialects.user_options import (
    UserOption,
    given_arguments,
    given_in,
    normal_name,
    without_launcher,
    world_of,
)

LLM, PRECISION = "model_config.llm", "accelerate_config.precision"
_FILE = read_file("mindspeed")
OWN = tables_of(_FILE)["own"]
_SECTIONS = {
    "model_config": "model experts recomputation",
    "model_config.moe_config": "experts",
    "training_config": "training profiler parallelism others",
    "dataset_config": "data",
    "optimizer_config": "optimizer training parallelism others",
    "parallel_config": "parallelism recomputation",
}  # section -> the Megatron tables whose keys it can contain
# Sections can be inside these blocks, or at the top level.
_PREFIXES = ("train_config.ms_training_config.", "train_config.")


_OWN_NAMES = [key.name for key in OWN]
ALIASES: dict[str, str] = {
    name: key.name
    for section, tables in _SECTIONS.items()
    for table in tables.split()
    for key in TABLES[table]
    if (name := f"{section}.{key.name}") not in _OWN_NAMES
} | _FILE["aliases"]
"""Maps dotted option names of MindSpeed-Core-MS to the Megatron arguments with the same meaning."""


def without_outer_block(name: str) -> str:
    """Return the dotted name ``SECTION.KEY`` of a MindSpeed-Core-MS option that may be inside the block
    ``train_config`` or ``train_config.ms_training_config``. ``train_config.SECTION.KEY`` becomes
    ``SECTION.KEY``. ``train_config.KEY`` becomes ``training_config.KEY``, because keys directly in the block
    belong to that section. Any other name is returned unchanged."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.split(".")[0] in _SECTIONS else f"training_config.{rest}"
    return name


class _Names(KeyTable):
    """A key table with the options of MindSpeed-Core-MS and of Megatron. Options in a section of the file
    have their MindSpeed-Core-MS names. Options outside the sections have Megatron's names."""

    _names = (*_OWN_NAMES, *ALIASES)

    def find(self, name: str) -> Key | None:
        name = without_outer_block(name)
        name = ALIASES.get(name, name)
        return super().find(name) or (None if "." in name else super().find(normal_name(name)))

    def is_block(self, name: str) -> bool:
        inner = without_outer_block(name)
        is_outer = name == "train_config" or inner == "training_config.ms_training_config"
        prefix = f"{inner}."
        return is_outer or super().is_block(name) or any(one.startswith(prefix) for one in self._names)

    def nearest(self, name: str) -> str:
        return nearest_names(without_outer_block(name), list(self._names))


TABLE = _Names([*OWN, *ALL_KEYS.keys])


def documented() -> dict[str, KeyTable]:
    """Return the key tables of the documentation page, one for each section of the YAML file. They contain
    Megatron's options under their MindSpeed-Core-MS names, and the options that only MindSpeed-Core-MS
    has."""
    groups: dict[str, list[Key]] = {}
    for key in [*(replace(ALL_KEYS.find(theirs), name=name) for name, theirs in ALIASES.items()), *OWN]:
        groups.setdefault(key.name.split(".")[0], []).append(key)
    return {name: KeyTable(keys) for name, keys in groups.items()}


TITLE = "MindSpeed-Core-MS"
FILE_OPTIONS = ("yaml_cfg", "config_path", "config")
_NO_EVALUATION = "eval_interval is not given: no evaluation"


def of_file(path: Path, argv: Sequence[str] = (), world_size: int | None = None) -> Translation:
    """Translate a YAML file of MindSpeed-Core-MS. Megatron arguments in ``argv`` override the file."""
    tree = read_yaml(path, is_ours=False)
    given = [_without_empty_text(one) for one in given_in(tree)]
    _refuse_two_answers(given)
    given += given_arguments(argv, FLAGS, MANY)
    given += _implied(given)
    world_size = world_size or world_of(os.environ)
    return translate(TITLE, shown_path(path), given, TABLE, _RULES, world_size)


def of_arguments(argv: Sequence[str], world_size: int | None = None) -> Translation:
    """Translate a command line of MindSpeed-Core-MS, ``[msrun ...] pretrain_gpt.py --yaml-cfg FILE
    [ARGUMENTS]``.
    """
    world, argv, _ = without_launcher(argv)
    path, rest = file_of(argv)
    if path is None:
        raise ConfigError("names no file; give --yaml-cfg FILE", key="--yaml-cfg", place="the command line")
    return of_file(path, rest, world_size or world)


def file_of(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split a command line into the configuration file that ``--yaml-cfg`` names and all other arguments."""
    path, rest, words = None, [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--") and normal_name(name) in FILE_OPTIONS:
            path = Path(value if equals else next(words, ""))
        else:
            rest.append(word)
    return path, rest


def _refuse_two_answers(given: Sequence[UserOption]) -> None:
    """Raise ConfigError if the file sets an option twice, under different names and to different values."""
    seen: dict[str, UserOption] = {}
    for one in given:
        if one.value is None:
            continue
        name = without_outer_block(one.key)
        earlier = seen.setdefault(ALIASES.get(name, name), one)
        if earlier.value != one.value:
            raise one.error(
                f"contradicts {earlier.key} = {shown(earlier.value)} ({earlier.place}); give one of them"
            )


def _without_empty_text(one: UserOption) -> UserOption:
    """Return ``one`` with the value None if its value is an empty string. The toolkit's files have empty
    strings for paths that are not set."""
    return replace(one, value=None) if isinstance(one.value, str) and not one.value.strip() else one


def _implied(given: list[UserOption]) -> Iterator[UserOption]:
    names = {
        ALIASES.get(without_outer_block(one.key), normal_name(one.key)): one
        for one in given
        if one.value is not None
    }
    if "seq_length" not in names and "max_position_embeddings" in names:
        one = names["max_position_embeddings"]
        yield replace(one, key="seq_length", place=f"{one.place}, {one.key}")
    if "eval_interval" not in names and "eval_iters" not in names:
        yield UserOption("eval_iters", 0, _NO_EVALUATION)


DIALECT = Dialect(
    name="mindspeed",
    title=TITLE,
    tables=documented(),
    of_file=of_file,
    of_arguments=of_arguments,
    programs=frozenset({"msrun", "pretrain_gpt.py"}),
    keys_of_files=frozenset(
        {"train_config", "accelerate_config", *(key for key in _SECTIONS if "." not in key)}
    ),
    options=frozenset(FILE_OPTIONS),
)


_NORMS = ("rmsnorm", "layernorm")
_FUSED = ("flash_attention", "rope", "swiglu", "masked_softmax", "gradient_accumulation", *_NORMS)
_WORDS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _network(run: Translation) -> None:
    _attention(run)
    unit, padded = f"{LLM}.tokenizer.divided_by", "padded_vocab_size"
    if unit in run and padded in run:
        size, divisor = run.integer(padded, least=1), run.integer(unit, least=1)
        tensor = run.integer(TENSOR, 1, least=1)
        if size % divisor or size % tensor:
            raise run.conflict((padded, unit, TENSOR), f"must divide by {divisor} and by {tensor} ranks")
    run.put("Model.scale_output_init", False, why="initial weights there do not depend on the depth")


def _attention(run: Translation) -> None:
    kind, groups = f"{LLM}.blocks.attention.attention_type", f"{LLM}.blocks.attention.kv_group_size"
    which = run.choice(kind, ("MHA", "GQA", "MQA"))
    number = run.integer(groups, least=1)
    if which == "MQA" and number not in (None, 1):
        raise run.conflict((groups, kind), "multi-query attention has one key/value head")
    if which == "GQA" and number is None:
        raise run.error(kind, "needs kv_group_size, the number of key/value heads")
    if which == "MQA" or (which == "GQA" and number is not None):
        run.put("Model.num_query_groups", number or 1, kind, groups)


def _precision(run: Translation) -> None:
    residual, fused = (f"{PRECISION}.{name}" for name in ("residual-connection", "fused_operators"))
    dtype = run.native.get("Engine.mix_precision.dtype")
    if residual in run and dtype is not None:
        written = run.text(residual)
        if _WORDS.get(written, written) != dtype.value:
            raise run.error(
                residual, f"must be {dtype.value}, the type of compute_dtype: branches are added in it"
            )
    if fused in run:
        words = [word.strip() for word in run.text(fused).split(",")]
        if strange := [word for word in words if word not in _FUSED]:
            raise run.error(fused, f"{strange[0]!r} is not one of {', '.join(_FUSED)}")
        if "flash_attention" in words:
            run.put("Model.use_flash_attn", True, fused)


def _checkpoints(run: Translation) -> None:
    """Translate the options for checkpoints: where and how often to save them, and which checkpoint to start
    from. With ``resume_training``, the run resumes from ``load`` or, without ``load``, from its output
    directory ``save``. Without ``resume_training``, the run only takes its initial weights from ``load``."""
    prefix, save, load = "Engine.save_load", run.text("save", "./output"), run.text("load")
    run.put(f"{prefix}.output_dir", save, "save", why="" if "save" in run else "its default")
    interval = run.integer("save_interval", 0, least=0)
    why = "" if "save_interval" in run else "save_interval is not given: only at the end"
    run.put(f"{prefix}.save_steps", interval, "save_interval", why=why)
    origins = run.origins("resume_training", "load", "save")
    if not run.flag("resume_training", False):
        if load is not None:
            run.put(f"{prefix}.init_from", load, *origins, why="without resume_training: its weights alone")
    elif load is None or os.path.normpath(load) == os.path.normpath(save):
        run.put(f"{prefix}.resume", True, *origins)
    else:
        run.put(f"{prefix}.ckpt_dir", load, *origins)


_RULES: tuple[Rule, ...] = (
    network_rules.required,
    _network,
    network_rules.network,
    experts,
    network_rules.vocabulary,
    network_rules.data,
    training_rules.batches,
    training_rules.device,
    training_rules.precision,
    _precision,
    training_rules.optimizer,
    training_rules.schedule,
    _checkpoints,
    training_rules.profiler,
    partial(training_rules.logs, callback="mindspeed_log", interval=1),
    plan,
    recomputation,
)
