"""MindSpeed-Core-MS: the YAML file of ``pretrain_gpt.py``, followed by Megatron's arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.reading.parse import read_yaml, shown_path
from ppfleetx.dialects.given import Given, given_arguments, given_in, normal_name, without_launcher, world_of
from ppfleetx.dialects.megatron import network_rules, run_rules
from ppfleetx.dialects.megatron.dialect import FLAGS, MANY
from ppfleetx.dialects.megatron.expert_rules import experts
from ppfleetx.dialects.megatron.network_rules import TENSOR
from ppfleetx.dialects.megatron.plan_rules import plan_rule, recomputation
from ppfleetx.dialects.mindspeed.keys import ALIASES, LLM, PRECISION, TABLE, documented, plain
from ppfleetx.dialects.registry import Dialect
from ppfleetx.dialects.translation import Rule, Translation, translate

TITLE = "MindSpeed-Core-MS"
FILE_OPTIONS = ("yaml_cfg", "config_path", "config")
_NO_EVALUATION = "eval_interval is not given: no evaluation"


def of_file(path: Path, argv: Sequence[str] = (), world_size: int | None = None) -> Translation:
    """Translate a YAML file, with Megatron's arguments, which override the file."""
    tree = read_yaml(path, is_ours=False)
    given = [_without_empty_text(one) for one in given_in(tree)]
    _refuse_two_answers(given)
    given += given_arguments(argv, FLAGS, MANY)
    given += _implied(given)
    return translate(TITLE, shown_path(path), given, TABLE, _rules(world_size or world_of(os.environ)))


def of_arguments(argv: Sequence[str], world_size: int | None = None) -> Translation:
    """Translate a command line, ``[msrun ...] pretrain_gpt.py --yaml-cfg FILE [ARGUMENTS]``."""
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
        _network,
        network_rules.network,
        experts,
        network_rules.vocabulary,
        network_rules.data,
        run_rules.batches,
        run_rules.device,
        run_rules.precision,
        _precision,
        run_rules.optimizer,
        run_rules.schedule,
        _checkpoints,
        run_rules.profiler,
        run_rules.logs_rule("mindspeed_log", interval=1),
        plan_rule(world_size),
        recomputation,
    ]


def _refuse_two_answers(given: Sequence[Given]) -> None:
    """Refuse a file that sets one thing under two names, to different values."""
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
    """Replace an empty text by None: the toolkit's files leave a path unset in this way."""
    return replace(one, value=None) if isinstance(one.value, str) and not one.value.strip() else one


def _implied(given: list[Given]) -> Iterator[Given]:
    """Yield values that follow from given keys, or from their absence."""
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


_FUSED = (
    "flash_attention",
    "rope",
    "rmsnorm",
    "swiglu",
    "masked_softmax",
    "gradient_accumulation",
    "layernorm",
)
_FLOAT32 = ("float32", "fp32")
_WORDS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _network(run: Translation) -> None:
    """Translate the blocks of ``model_config.llm``, and initial weights."""
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
    """Translate the keys of ``accelerate_config.precision`` besides the two types."""
    softmax, residual, fused = (
        f"{PRECISION}.{name}" for name in ("softmax_compute_dtype", "residual-connection", "fused_operators")
    )
    if softmax in run:
        run.put("Model.softmax_in_fp32", run.text(softmax) in _FLOAT32, softmax)
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
    """Translate ``load_checkpoint``: it gives weights to a new run or, with ``resume_training``, resumes the
    run.
    """
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
