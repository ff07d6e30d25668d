"""Rules of PaddleFormers' arguments that are read together."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from ppfleetx.config.errors import ConfigError
from ppfleetx.dialects.reading import Reading
from ppfleetx.dialects.translation import Translation
from ppfleetx.utils.devices import CPU, GPU, NPU, XPU, expected_device, of_recipe

_DEFAULT = "its default"
_STYLES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_DEGREES = {
    "Distributed.mp_degree": ("tensor_model_parallel_size", "tensor_parallel_degree"),
    "Distributed.pp_degree": ("pipeline_model_parallel_size", "pipeline_parallel_degree"),
    "Distributed.sep_degree": ("sep_parallel_size", "sep_parallel_degree"),
    "Distributed.ep_degree": ("expert_model_parallel_size", "expert_parallel_degree"),
    "Distributed.expert_mp_degree": ("expert_tensor_model_parallel_size", "expert_tensor_parallel_degree"),
    "Model.virtual_pp_degree": ("virtual_pp_degree", "virtual_pipeline_model_parallel_size"),
}
_SHARDING = ("sharding_parallel_size", "sharding_parallel_degree", "sharding_degree")
_DATA = ("data_parallel_size", "data_parallel_degree")

CONFIG = "config.json"
_KINDS = ("gpt2", "llama")
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}


def network(reading: Reading, result: Translation) -> None:
    """What kind of network ``config.json`` describes."""
    kind_key = f"{CONFIG}.model_type"
    if kind_key not in reading:
        return
    if reading.value(kind_key) not in _KINDS:
        raise reading.error(
            kind_key,
            f"must be one of {', '.join(_KINDS)}; convert the weights of another network (ppfleetx "
            "convert) and name the result, whose config.yaml is read",
        )
    kind = reading.value(kind_key)
    origins = reading.origins(kind_key)
    act = _ACTIVATIONS[reading.choice(f"{CONFIG}.activation_function", _ACTIVATIONS, "gelu_new")]
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
        result.put(f"Model.{key}", value, *origins)
    tied = f"{CONFIG}.tie_word_embeddings"
    result.put(
        "Model.tie_word_embeddings", reading.flag(tied, kind == "gpt2"), *reading.origins(tied, kind_key)
    )
    default = 0.1 if kind == "gpt2" else 0.0
    hidden, embedded = f"{CONFIG}.resid_pdrop", f"{CONFIG}.embd_pdrop"
    _unless(result, "Model.hidden_dropout_prob", reading.number(hidden, default), reading.origins(hidden))
    if embedded in reading:
        dropout = reading.number(embedded)
        _unless(result, "Model.embedding_dropout_prob", dropout, reading.origins(embedded))
    names = (f"{CONFIG}.attn_pdrop", f"{CONFIG}.attention_dropout")
    attention = next((reading.number(name) for name in names if name in reading), default)
    _unless(result, "Model.attention_probs_dropout_prob", attention, reading.origins(*names))


def balancing(reading: Reading, result: Translation) -> None:
    """The update of a router's bias, which only a network with such a bias has."""
    name, has_bias = "moe_router_bias_update_rate", "config.yaml.Model.moe.router.bias"
    if name in reading and reading.value(has_bias) is True:
        rate = reading.number(name, least=0.0)
        result.replace("Model.moe.bias_update_rate", rate, *reading.origins(name))


def _unless(result: Translation, key: str, value: float, origins: tuple) -> None:
    """Set what an argument of the run has not set."""
    if key not in result.native:
        result.put(key, value, *origins, why="" if origins else _DEFAULT)


def plan_rule(world_size: int | None) -> Callable[[Reading, Translation], None]:
    """The rule for degrees in a job of ``world_size`` processes; None: not known."""

    def plan(reading: Reading, result: Translation) -> None:
        degrees = {key: _degree(reading, names) for key, names in _DEGREES.items()}
        for key, value in degrees.items():
            if value is not None and (value > 1 or "expert" not in _DEGREES[key][0]):
                result.put(key, value, *reading.origins(*_DEGREES[key]))
        if reading.value("sequence_parallel") in (True, 1) and (degrees["Distributed.mp_degree"] or 1) > 1:
            result.put("Model.sequence_parallel", True, *reading.origins("sequence_parallel"))
        model = math.prod(degrees[f"Distributed.{axis}_degree"] or 1 for axis in ("mp", "pp", "sep"))
        if world_size is not None and world_size % model:
            raise ConfigError(
                f"the job has {world_size} processes, which {model} (tensor x pipeline x sep) do not divide",
                key="tensor_model_parallel_size",
                place=result.place,
            )
        _sharding(reading, result, None if world_size is None else world_size // model)

    return plan


def _degree(reading: Reading, names: tuple[str, ...]) -> int | None:
    """The degree under either of its names; -1 and 0 stand for 1."""
    said = {name: reading.integer(name, least=-1) for name in names if name in reading}
    found = {name: max(1, value) for name, value in said.items()}
    if len(set(found.values())) > 1:
        raise reading.conflict(tuple(found), "two names of one degree differ")
    return next(iter(found.values()), None)


def _sharding(reading: Reading, result: Translation, replicas: int | None) -> None:
    words = str(reading.value("sharding", "")).split()
    if strange := [word for word in words if word not in ("stage1", "stage2", "stage3", "offload")]:
        raise reading.error("sharding", f"{strange[0]!r} is not one of stage1, stage2, stage3 and offload")
    stages = [int(word[-1]) for word in words if word != "offload"]
    if len(stages) > 1 or (words and not stages):
        raise reading.error("sharding", "names one stage, e.g. 'stage2 offload'")
    if not stages:
        return
    origins = reading.origins("sharding", *_SHARDING)
    degrees = [value for name in _SHARDING if (value := reading.integer(name, -1, least=-1)) > 0]
    if len(set(degrees)) > 1:
        raise reading.conflict(_SHARDING, "names of one degree differ")
    degree = degrees[0] if degrees else replicas
    if degree is None:
        result.notes.append(
            "the states are shared out over all data-parallel ranks there; how many is not known here: give "
            "sharding_parallel_size"
        )
        return
    if replicas is not None and replicas % degree:
        raise reading.conflict(
            ("sharding", *_SHARDING), f"{degree} do not divide the {replicas} data-parallel ranks"
        )
    result.put("Distributed.sharding.sharding_degree", degree, *origins)
    result.put("Distributed.sharding.sharding_stage", stages[0], *origins)
    if "offload" in words and degree > 1:
        result.put("Distributed.sharding.sharding_offload", True, *origins)
    said = _degree(reading, _DATA)
    data = said if said is not None else None if replicas is None else replicas // degree
    result.put("Distributed.dp_degree", data, *reading.origins("sharding", *_DATA))


def batches(reading: Reading, result: Translation) -> None:
    """Micro batch, accumulation and length."""
    for name, key, default in (
        ("per_device_train_batch_size", "Global.micro_batch_size", 8),
        ("gradient_accumulation_steps", "Engine.accumulate_steps", 1),
        ("logging_steps", "Engine.logging_freq", 5),
        ("seed", "Global.seed", 42),
    ):
        _put(reading, result, name, key, reading.integer(name, default, least=0))
    if reading.integer("global_batch_size", -1) > 0:
        _put(
            reading,
            result,
            "global_batch_size",
            "Global.global_batch_size",
            reading.integer("global_batch_size"),
        )
    if reading.integer("max_steps", -1) < 1:
        raise ConfigError(
            "must be given: a run here is as long as its steps", key="max_steps", place=result.place
        )
    _put(reading, result, "max_steps", "Engine.max_steps", reading.integer("max_steps"))
    if "dataloader_num_workers" in reading:
        number = reading.integer("dataloader_num_workers", least=0)
        _put(reading, result, "dataloader_num_workers", "Data.Train.loader.num_workers", number)
    names = ("profile_step_start", "profile_step_end")
    if reading.flag("profile", False):
        steps = [
            reading.integer(name, default, least=0) for name, default in zip(names, (10, 12), strict=True)
        ]
        result.put("Profiler.scheduler", steps, *reading.origins(*names))


def _put(reading: Reading, result: Translation, name: str, key: str, value: object) -> None:
    result.put(key, value, *reading.origins(name), why="" if name in reading else _DEFAULT)


def precision(reading: Reading, result: Translation) -> None:
    """Device and type of computation."""
    written = reading.choice("device", (GPU, NPU, XPU, CPU), GPU)
    chosen, instead = of_recipe(written) if written in (NPU, XPU) else ("auto" if written == GPU else CPU, "")
    if reading.flag("no_cuda", False):
        chosen = "cpu"
    result.put(
        "Global.device",
        chosen,
        *reading.origins("device", "no_cuda"),
        why=instead if "device" in reading else _DEFAULT,
    )
    on = {
        name: dtype
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16"))
        if reading.flag(name, False)
    }
    if len(on) > 1:
        raise reading.conflict(tuple(on), "a run computes in one precision; give one of these")
    level = reading.choice("fp16_opt_level", ("O0", "O1", "O2"), "O1")
    if not on or level == "O0":
        return
    name, dtype = next(iter(on.items()))
    on_cpu = expected_device(chosen) == CPU
    origins, prefix = reading.origins(name), "Engine.mix_precision"
    result.put(f"{prefix}.enable", not on_cpu, *origins, why="a CPU computes in float32" if on_cpu else "")
    result.put(f"{prefix}.dtype", dtype, *origins)
    result.put(
        f"{prefix}.level",
        level,
        *reading.origins("fp16_opt_level"),
        why="" if "fp16_opt_level" in reading else _DEFAULT,
    )
    if on_cpu:
        result.notes.append(f"{dtype} is for accelerators: this CPU computes in float32")


def optimizer(reading: Reading, result: Translation) -> None:
    """AdamW and the learning rate."""
    for name, key, default in (
        ("learning_rate", "Optimizer.lr.max_lr", 1e-5),
        ("weight_decay", "Optimizer.weight_decay", 0.1),
        ("adam_beta2", "Optimizer.beta2", 0.95),
    ):
        _put(reading, result, name, key, reading.number(name, default, least=0.0))
    style = _STYLES[reading.choice("lr_scheduler_type", _STYLES, "linear")]
    _put(reading, result, "lr_scheduler_type", "Optimizer.lr.decay_style", style)
    for name in ("min_learning_rate", "min_lr"):
        if name in reading:
            result.put("Optimizer.lr.min_lr", reading.number(name, least=0.0), *reading.origins(name))
    if "decay_steps" in reading:
        _put(
            reading,
            result,
            "decay_steps",
            "Optimizer.lr.decay_steps",
            reading.integer("decay_steps", least=1),
        )
    steps, ratio = reading.integer("warmup_steps", 0, least=0), reading.number("warmup_ratio", 0.0, least=0.0)
    if steps:
        _put(reading, result, "warmup_steps", "Optimizer.lr.warmup_steps", steps)
    elif ratio:
        number = math.ceil(ratio * reading.integer("max_steps"))
        result.put("Optimizer.lr.warmup_steps", number, *reading.origins("warmup_ratio", "max_steps"))


def data(reading: Reading, result: Translation) -> None:
    """Corpora, and whether there is an evaluation."""
    if "input_dir" not in reading:
        raise ConfigError("is missing", key="input_dir", place=result.place)
    strategy = reading.choice("evaluation_strategy", ("no", "steps"))
    asks = strategy == "steps" or (strategy is None and reading.flag("do_eval", False))
    freq = reading.integer("eval_steps", least=1) if asks else None
    if asks and freq is None:
        freq = reading.integer("logging_steps", 5)
    result.put(
        "Engine.eval_freq",
        freq or 0,
        *reading.origins("eval_steps", "do_eval", "evaluation_strategy"),
        why="" if asks else "no evaluation is asked for",
    )
    for section in ("Train", "Eval") if asks else ("Train",):
        _corpus(reading, result, f"Data.{section}.dataset")
    if asks:
        number = reading.integer("eval_iters", 0) or reading.integer("max_evaluate_steps", 0)
        result.put(
            "Engine.eval_iters",
            number if number > 0 else 10,
            *reading.origins("eval_iters", "max_evaluate_steps"),
        )
    name = "tokenizer_name_or_path"
    if name in reading:
        text = reading.text(name)
        if os.path.isdir(text):  # noqa: PTH112 - Path.is_dir raises for names that no file can have
            result.put("Data.tokenizer.dir", text, *reading.origins(name))
        else:
            result.notes.append(f"{name} {text} is not a directory here; a corpus of token ids needs none")


def _corpus(reading: Reading, result: Translation, prefix: str) -> None:
    origins, words = reading.origins("input_dir"), reading.text("input_dir").replace(",", " ").split()
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 == 0 and all(weight is not None for weight in weights):
        names = words[1::2]
        if len(names) > 1:
            result.put(f"{prefix}.weights", weights, *origins)
    else:
        names = words
    result.put(f"{prefix}.input_dir", names if len(names) > 1 else names[0], *origins)
    split = reading.value("split", "949,50,1")
    result.put(
        f"{prefix}.split", split, *reading.origins("split"), why="" if "split" in reading else _DEFAULT
    )
    lengths = ("max_seq_length", "max_seq_len")
    given = next((reading.integer(name, least=1) for name in lengths if name in reading), 1024)
    result.put(f"{prefix}.max_seq_len", given, *reading.origins(*lengths))
    if "data_cache" in reading:
        result.put(f"{prefix}.cache_dir", reading.text("data_cache"), *reading.origins("data_cache"))
    if "eod_mask_loss" in reading:
        result.put(
            f"{prefix}.eod_mask_loss", reading.flag("eod_mask_loss"), *reading.origins("eod_mask_loss")
        )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def checkpoints(reading: Reading, result: Translation) -> None:
    """When a run is saved, and what it starts from."""
    prefix = "Engine.save_load"
    if reading.choice("save_strategy", ("no", "steps"), "steps") == "no":
        result.put(f"{prefix}.save_steps", 0, *reading.origins("save_strategy"))
    else:
        _put(
            reading, result, "save_steps", f"{prefix}.save_steps", reading.integer("save_steps", 500, least=1)
        )
    if reading.flag("load_best_model_at_end", False):
        result.put(f"{prefix}.keep_best", "loss", *reading.origins("load_best_model_at_end"))
    resume = reading.value("resume_from_checkpoint")
    if isinstance(resume, bool):
        result.put(
            f"{prefix}.resume", "auto" if resume else False, *reading.origins("resume_from_checkpoint")
        )
    elif resume is not None:
        result.put(
            f"{prefix}.ckpt_dir",
            reading.text("resume_from_checkpoint"),
            *reading.origins("resume_from_checkpoint"),
        )
    if reading.value("continue_training") in (True, 1):
        names = ("model_name_or_path", "continue_training")
        result.put(f"{prefix}.init_from", reading.text("model_name_or_path"), *reading.origins(*names))


def recomputation(reading: Reading, result: Translation) -> None:
    """What is forgotten in the forward pass and computed again."""
    words = {"full": "full", "full_attn": "full_attn", "core_attn": "core_attn", "selective": "core_attn"}
    granularity = reading.choice("recompute_granularity", words)
    if not reading.flag("recompute", "recompute" not in reading and granularity is not None):
        return
    names = ("recompute", "recompute_granularity", "recompute_method", "recompute_num_layers")
    result.put("Model.use_recompute", True, *reading.origins(*names[:2]))
    result.put("Model.recompute_granularity", words[granularity or "full"], *reading.origins(*names[:2]))
    if reading.choice("recompute_method", ("uniform", "block")) != "block":
        return
    count = reading.integer("recompute_num_layers", least=1)
    layers, stages = (result.native.get(key) for key in ("Model.num_layers", "Distributed.pp_degree"))
    if count is None or layers is None or type(layers.value) is not int:
        raise reading.error("recompute_method", "needs recompute_num_layers")
    each = -(-layers.value // (1 if stages is None else stages.value))
    chosen = [layer for layer in range(min(layers.value, 10_000)) if layer % each < count]
    result.put("Model.recompute_layers", chosen, *reading.origins(*names[2:]))
