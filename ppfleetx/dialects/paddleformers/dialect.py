"""Translation of PaddleNLP and PaddleFormers: the command line of their pretraining programs, or a YAML or
JSON file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.parse import shown_path
from ppfleetx.dialects.key_tables import KeyTable, read_file, tables_of
from ppfleetx.dialects.megatron.training_rules import profiler
from ppfleetx.dialects.registry import Dialect
from ppfleetx.dialects.translation import Rule, Translation, translate
from ppfleetx.dialects.user_options import (
    UserOption,
    given_arguments,
    given_in_file,
    weighted_corpora,
    without_launcher,
    world_of,
)
from ppfleetx.utils.device_support import CPU, GPU, NPU, XPU, device_for_recipe, expected_device

_SHARDING = ("sharding_parallel_size", "sharding_parallel_degree", "sharding_degree")
_DATA = ("data_parallel_size", "data_parallel_degree")

CONFIG = "config.json"
_KINDS = ("gpt2", "llama")
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}


def network(run: Translation) -> None:
    """Translate the network that the model's ``config.json`` describes. Raises ConfigError unless it is a
    GPT-2 or a Llama."""
    kind_key = f"{CONFIG}.model_type"
    if kind_key not in run:
        return
    kind = run.value(kind_key)
    if kind not in _KINDS:
        raise run.error(
            kind_key,
            f"must be one of {', '.join(_KINDS)}; convert the weights of another network (ppfleetx "
            "convert) and name the result, whose config.yaml is read",
        )
    origins = run.origins(kind_key)
    act = _ACTIVATIONS[run.choice(f"{CONFIG}.activation_function", _ACTIVATIONS, "gelu_new")]
    shape = {
        "gpt2": {
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "hidden_act": act,
        },
        "llama": {
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "hidden_act": "swiglu",
            "add_bias_linear": False,
        },
    }[kind]
    for key, value in shape.items():
        run.put(f"Model.{key}", value, *origins)
    tied = f"{CONFIG}.tie_word_embeddings"
    run.put("Model.tie_word_embeddings", run.flag(tied, kind == "gpt2"), tied, kind_key)
    default = 0.1 if kind == "gpt2" else 0.0
    hidden, embedded = f"{CONFIG}.resid_pdrop", f"{CONFIG}.embd_pdrop"
    _unless(run, "Model.hidden_dropout_prob", run.number(hidden, default), hidden)
    _unless(run, "Model.embedding_dropout_prob", run.number(embedded), embedded)
    names = (f"{CONFIG}.attn_pdrop", f"{CONFIG}.attention_dropout")
    attention = run.number(run.first(*names), default)
    _unless(run, "Model.attention_probs_dropout_prob", attention, *names)


def balancing(run: Translation) -> None:
    """Translate the update rate of the router's load-balancing bias, if the network has such a bias."""
    name, has_bias = "moe_router_bias_update_rate", "config.yaml.Model.moe.router.bias"
    if run.value(has_bias) is True:
        run.replace("Model.moe.bias_update_rate", run.number(name, least=0.0), name)


def _unless(run: Translation, key: str, value: float, *names: str) -> None:
    if key not in run.native:
        run.put(key, value, *names)


_arguments = partial(given_arguments, flags=(), known=())
"""Read command-line arguments. Every option without a value is a flag."""


def plan(run: Translation) -> None:
    """Translate parallel degrees and sharding."""
    degrees = [
        run.native[key].value if (key := f"Distributed.{axis}_degree") in run.native else 1
        for axis in ("mp", "pp", "sep")
    ]
    if run.value("sequence_parallel") in (True, 1) and degrees[0] > 1:
        run.put("Model.sequence_parallel", True, "sequence_parallel")
    model, processes = math.prod(degrees), run.world_size
    if processes is not None and processes % model:
        raise ConfigError(
            f"the job has {processes} processes, which {model} (tensor x pipeline x sep) do not divide",
            key="tensor_model_parallel_size",
            place=run.place,
        )
    _sharding(run, None if processes is None else processes // model)


def _sharding(run: Translation, replicas: int | None) -> None:
    words = str(run.value("sharding", "")).split()
    if strange := [word for word in words if word not in ("stage1", "stage2", "stage3", "offload")]:
        raise run.error("sharding", f"{strange[0]!r} is not one of stage1, stage2, stage3 and offload")
    stages = [int(word[-1]) for word in words if word != "offload"]
    if len(stages) > 1 or (words and not stages):
        raise run.error("sharding", "names one stage, e.g. 'stage2 offload'")
    if not stages:
        return
    origins = run.origins("sharding", *_SHARDING)
    degrees = [value for name in _SHARDING if (value := run.integer(name, -1, least=-1)) > 0]
    if len(set(degrees)) > 1:
        raise run.conflict(_SHARDING, "these set the same degree to different values")
    degree = degrees[0] if degrees else replicas
    if degree is None:
        run.notes.append(
            "there, the states are sharded over all data-parallel ranks, whose number is not known here: "
            "give sharding_parallel_size"
        )
        return
    if replicas is not None and replicas % degree:
        raise run.conflict(
            ("sharding", *_SHARDING), f"{degree} do not divide the {replicas} data-parallel ranks"
        )
    run.put("Distributed.sharding.sharding_degree", degree, *origins)
    run.put("Distributed.sharding.sharding_stage", stages[0], *origins)
    if "offload" in words and degree > 1:
        run.put("Distributed.sharding.sharding_offload", True, *origins)
    if "Distributed.dp_degree" not in run.native and replicas is not None:
        run.put("Distributed.dp_degree", replicas // degree, "sharding", *_DATA)


def length(run: Translation) -> None:
    """Raise ConfigError unless ``max_steps`` is given and positive. The key table translates the batch
    sizes."""
    if run.integer("max_steps", -1) < 1:
        raise ConfigError(
            "must be given: a run here is as long as its steps", key="max_steps", place=run.place
        )


def precision(run: Translation) -> None:
    """Translate the options for the device and the compute type (float32, float16 or bfloat16)."""
    written = run.choice("device", (GPU, NPU, XPU, CPU), GPU)
    chosen, instead = (
        device_for_recipe(written) if written in (NPU, XPU) else ("auto" if written == GPU else CPU, "")
    )
    if run.flag("no_cuda", False):
        chosen = "cpu"
    run.put("Global.device", chosen, "device", "no_cuda", why=instead)
    on = {name: dtype for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if run.flag(name, False)}
    if len(on) > 1:
        raise run.conflict(tuple(on), "a run computes in one precision; give one of these")
    level = run.choice("fp16_opt_level", ("O0", "O1", "O2"), "O1")
    if not on or level == "O0":
        return
    name, dtype = next(iter(on.items()))
    run.put_precision(dtype, name, on_cpu=expected_device(chosen) == CPU)
    run.put("Engine.mix_precision.level", level, "fp16_opt_level")


def optimizer(run: Translation) -> None:
    """Translate the options for the warm-up of the learning rate. The key table translates the optimizer's
    other options."""
    steps, ratio = run.integer("warmup_steps", 0, least=0), run.number("warmup_ratio", 0.0, least=0.0)
    if steps:
        run.put("Optimizer.lr.warmup_steps", steps, "warmup_steps")
    elif ratio:
        number = math.ceil(ratio * run.integer("max_steps"))
        run.put("Optimizer.lr.warmup_steps", number, "warmup_ratio", "max_steps")


def data(run: Translation) -> None:
    """Translate the options for data, evaluation and tokenizer, such as the paths of corpora and the sequence
    length."""
    if "input_dir" not in run:
        raise ConfigError("is missing", key="input_dir", place=run.place)
    strategy = run.choice("evaluation_strategy", ("no", "steps"))
    asks = strategy == "steps" or (strategy is None and run.flag("do_eval", False))
    freq = run.integer("eval_steps", least=1) if asks else None
    if asks and freq is None:
        freq = run.integer("logging_steps", 5)
    why = "" if asks else "no evaluation is asked for"
    run.put("Engine.eval_freq", freq or 0, "eval_steps", "do_eval", "evaluation_strategy", why=why)
    for section in ("Train", "Eval") if asks else ("Train",):
        _corpus(run, f"Data.{section}.dataset")
    if asks:
        number = run.integer("eval_iters", 0) or run.integer("max_evaluate_steps", 0)
        run.put("Engine.eval_iters", number if number > 0 else 10, "eval_iters", "max_evaluate_steps")
    name = "tokenizer_name_or_path"
    if name in run:
        text = run.text(name)
        if os.path.isdir(text):  # noqa: PTH112 (Path.is_dir raises PermissionError)
            run.put("Data.tokenizer.dir", text, name)
        else:
            run.notes.append(f"{name} {text} is not a directory here; a corpus of token ids needs none")


def _corpus(run: Translation, prefix: str) -> None:
    origins, words = run.origins("input_dir"), run.text("input_dir").replace(",", " ").split()
    names, weights = weighted_corpora(words)
    if len(names) > 1:
        run.put(f"{prefix}.weights", weights, *origins)
    run.put(f"{prefix}.input_dir", names if len(names) > 1 else names[0], *origins)
    split = run.value("split", "949,50,1")
    run.put(f"{prefix}.split", split, "split")
    lengths = ("max_seq_length", "max_seq_len")
    run.put(f"{prefix}.max_seq_len", run.integer(run.first(*lengths), 1024, least=1), *lengths)
    run.put(f"{prefix}.cache_dir", run.text("data_cache"), "data_cache")
    run.put(f"{prefix}.eod_mask_loss", run.flag("eod_mask_loss"), "eod_mask_loss")


def checkpoints(run: Translation) -> None:
    """Translate the options for checkpoints: when to save them, and which checkpoint to start from."""
    prefix = "Engine.save_load"
    if run.choice("save_strategy", ("no", "steps"), "steps") == "no":
        run.put(f"{prefix}.save_steps", 0, "save_strategy")
    else:
        run.put(f"{prefix}.save_steps", run.integer("save_steps", 500, least=1), "save_steps")
    resume = run.value("resume_from_checkpoint")
    if isinstance(resume, bool):
        run.put(f"{prefix}.resume", "auto" if resume else False, "resume_from_checkpoint")
    elif resume is not None:
        run.put(f"{prefix}.ckpt_dir", run.text("resume_from_checkpoint"), "resume_from_checkpoint")
    if run.value("continue_training") in (True, 1):
        names = ("model_name_or_path", "continue_training")
        run.put(f"{prefix}.init_from", run.text("model_name_or_path"), *names)


def recomputation(run: Translation) -> None:
    """Translate the options for activation recomputation."""
    words = {"full": "full", "full_attn": "full_attn", "core_attn": "core_attn", "selective": "core_attn"}
    granularity = run.choice("recompute_granularity", words)
    if not run.flag("recompute", "recompute" not in run and granularity is not None):
        return
    names = ("recompute", "recompute_granularity", "recompute_method", "recompute_num_layers")
    run.put("Model.use_recompute", True, *names[:2])
    run.put("Model.recompute_granularity", words[granularity or "full"], *names[:2])
    if run.choice("recompute_method", ("uniform", "block")) != "block":
        return
    count = run.integer("recompute_num_layers", least=1)
    layers, stages = (run.native.get(key) for key in ("Model.num_layers", "Distributed.pp_degree"))
    if count is None or layers is None or type(layers.value) is not int:
        raise run.error("recompute_method", "needs recompute_num_layers")
    each = -(-layers.value // (1 if stages is None else stages.value))
    chosen = [layer for layer in range(min(layers.value, 10_000)) if layer % each < count]
    run.put("Model.recompute_layers", chosen, *names[2:])


def profile(run: Translation) -> None:
    """Translate the options that say which steps the profiler records. PaddleFormers ignores them unless its
    option ``profile`` is set."""
    if run.flag("profile", False):
        profiler(run)


TITLE = "PaddleFormers"
TABLES = tables_of(read_file("paddleformers"))
TABLE = KeyTable([key for keys in TABLES.values() for key in keys])
_FILES = (".yaml", ".yml", ".json")
_MODEL, _OURS = "model_name_or_path", "config.yaml"
_RULES: tuple[Rule, ...] = (
    network,
    balancing,
    length,
    profile,
    precision,
    optimizer,
    data,
    checkpoints,
    plan,
    recomputation,
)


def of_file(path: Path, argv: Sequence[str] = (), world_size: int | None = None) -> Translation:
    """Translate a YAML or JSON file of PaddleFormers. Command-line arguments in ``argv`` override the
    file."""
    return _translated([*given_in_file(path), *_arguments(argv)], shown_path(path), world_size)


def of_arguments(argv: Sequence[str], world_size: int | None = None) -> Translation:
    """Translate a PaddleFormers command line, which either names a file or contains the options. A launcher
    and a program at the beginning, or ``paddleformers-cli train``, are removed."""
    world, argv, _ = without_launcher(argv)
    words = list(argv)
    if words[:1] == ["paddleformers-cli"]:
        words = words[2:] if words[1:2] == ["train"] else words[1:]
    world_size = world_size or world
    if words and words[0].endswith(_FILES):
        return of_file(Path(words[0]), words[1:], world_size)
    return _translated(list(_arguments(words)), "the command line", world_size)


def _translated(given: list[UserOption], place: str, world_size: int | None) -> Translation:
    named = [one for one in given if one.key.lstrip("-") == _MODEL and one.value is not None]
    if not named:
        raise ConfigError("is missing; the network is that of its config.json", key=_MODEL, place=place)
    network_keys = list(_keys_of_network(named[-1]))
    ours = {one.key: one for one in network_keys if one.key.startswith(f"{_OURS}.")}
    world_size = world_size or world_of(os.environ)

    def native(run: Translation) -> None:
        for key, one in ours.items():
            run.put(key.removeprefix(f"{_OURS}."), one.value, one)

    plain = [
        replace(one, key=one.key.lstrip("-").replace("-", "_")) if one.key[:2] == "--" else one
        for one in given
    ]
    return translate(TITLE, place, [*network_keys, *plain], TABLE, [native, *_RULES], world_size)


def _keys_of_network(one: UserOption) -> Iterator[UserOption]:
    directory = Path(str(one.value))
    # Path.is_file raises PermissionError.
    if os.path.isfile(directory / _OURS):  # noqa: PTH113
        keys = given_in_file(directory / _OURS, f"{_OURS}.", named=one)
        yield from (key for key in keys if key.key.startswith(f"{_OURS}.Model.") and key.value is not None)
    elif os.path.isfile(directory / CONFIG):  # noqa: PTH113
        yield from given_in_file(directory / CONFIG, f"{CONFIG}.", named=one)
    else:
        raise one.error(
            f"is not a directory with {CONFIG} here. Models are not downloaded: put the model's files into a "
            "directory and name that directory"
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
        {"per_device_train_batch_size", "tensor_parallel_degree", "input_dir", _MODEL, _SHARDING[0]}
    ),
)
