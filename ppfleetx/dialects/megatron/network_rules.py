"""Rules of Megatron's arguments that are read together: the network and its data.

Each takes what was given (:class:`Reading`) and puts native values into the translation. Those of the run are
in :mod:`ppfleetx.dialects.megatron.run_rules`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.dialects.given import Given
from ppfleetx.dialects.reading import Reading
from ppfleetx.dialects.translation import Translation
from ppfleetx.dialects.vocabularies import highest_id

COMMAND_LINE = "the command line"
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr")
# The vocabulary of GPT-2, where the file under its usual name is not there yet.
_GPT2_WORDS = {"gpt2-vocab.json": 50257}
# What use_rope_scaling means beside its factor (Megatron-LM, rotary_pos_embedding.py).
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ACTS = {
    "gelu": "gelu",
    "gelu_exact": "gelu_exact",
    "relu": "relu",
    "relu2": "relu2",
    "squared_relu": "relu2",
    "swiglu": "swiglu",
}


def required(reading: Reading, result: Translation) -> None:
    """Refuse a command line that Megatron itself would refuse for what it lacks."""
    absent = [name for name in REQUIRED if name not in reading]
    if "train_iters" not in reading and "train_samples" not in reading:
        absent.append("train_iters")
    if absent:
        first, *others = (option(name, result) for name in absent)
        raise ConfigError(
            f"is missing, and so are {', '.join(others)}" if others else "is missing",
            key=first,
            place=result.place,
        )


def option(name: str, result: Translation) -> str:
    """A key that is not given, as its user would write it: as an option of a command line, or in a file."""
    return f"--{name.replace('_', '-')}" if result.place == COMMAND_LINE else name


def network(reading: Reading, result: Translation) -> None:
    """Heads, positions, activation and window."""
    _heads(reading, result)
    _positions(reading, result)
    _activation(reading, result)
    _window(reading, result)
    if "attention_softmax_in_fp32" in reading:
        names = ("attention_softmax_in_fp32",)
        result.put("Model.softmax_in_fp32", reading.flag(names[0]), *reading.origins(*names))


def _heads(reading: Reading, result: Translation) -> None:
    names = ("group_query_attention", "num_query_groups")
    groups = reading.integer("num_query_groups", 1, least=1)
    if reading.flag("group_query_attention", False):
        result.put("Model.num_query_groups", groups, *reading.origins(*names))
    elif "num_query_groups" in reading and groups != 1:
        result.notes.append(
            f"num_query_groups {groups} has no effect without group_query_attention, as in Megatron"
        )


def _positions(reading: Reading, result: Translation) -> None:
    names = ("position_embedding_type", "use_rotary_position_embeddings", "no_position_embedding")
    if reading.value("position_embedding_type") in ("yarn", "mrope", "relative", "alibi"):
        raise reading.error(
            "position_embedding_type",
            "must be learned_absolute, rope or none; stretched rotary positions are "
            "rotary_seq_len_interpolation_factor or use_rope_scaling",
        )
    kind = reading.choice("position_embedding_type", ("learned_absolute", "rope", "none"))
    if reading.flag("use_rotary_position_embeddings", False):
        if kind not in (None, "rope"):
            raise reading.conflict(names, "rotary positions and another kind contradict each other")
        kind = "rope"
    if kind != "rope" and reading.flag("no_position_embedding", False):
        kind = "none"
    if kind is not None:
        result.put("Model.position_embedding_type", kind, *reading.origins(*names))
    if "max_position_embeddings" not in reading:
        result.put(
            "Model.max_position_embeddings",
            reading.integer("seq_length", least=1),
            *reading.origins("seq_length"),
            why="max_position_embeddings is not given",
        )
    _rope_scaling(reading, result)


def _rope_scaling(reading: Reading, result: Translation) -> None:
    interpolation = reading.number("rotary_seq_len_interpolation_factor", 1.0, least=1.0)
    names = ("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor")
    if reading.flag("use_rope_scaling", False):
        if interpolation != 1:
            raise reading.conflict(names, "positions are stretched in one way at a time; give one of these")
        scaling: dict[str, Any] = {
            "type": "llama3",
            "factor": reading.number("rope_scaling_factor", 8.0),
            **_LLAMA3,
        }
    elif interpolation != 1:
        scaling = {"type": "linear", "factor": interpolation}
    else:
        return
    result.put("Model.rope_scaling", scaling, *reading.origins(*names))


def _activation(reading: Reading, result: Translation) -> None:
    names = ("swiglu", "squared_relu", "openai_gelu", "hidden_act")
    chosen = {
        name: act for name, act in zip(names, ("swiglu", "relu2", "gelu"), strict=False) if reading.flag(name)
    }
    if "hidden_act" in reading:
        chosen["hidden_act"] = _ACTS[reading.choice("hidden_act", _ACTS)]
    if len(set(chosen.values())) > 1:
        raise reading.conflict(tuple(chosen), "there is one activation; give one of these")
    for name, act in chosen.items():
        result.put("Model.hidden_act", act, *reading.origins(name))
    unfused = ("no_bias_gelu_fusion", "disable_bias_linear")
    if not chosen and any(reading.flag(name, False) for name in unfused):
        result.put(
            "Model.hidden_act",
            "gelu_exact",
            *reading.origins(*unfused),
            why="where bias and GeLU are not fused, Megatron's GeLU is the exact one",
        )


def _window(reading: Reading, result: Translation) -> None:
    names = ("pre_tockens", "next_tockens")
    reading.integer("next_tockens", 0, least=0)
    left = reading.integer("pre_tockens", least=1)
    if left is None or left >= reading.integer("seq_length", least=1) - 1:
        return  # the window holds the whole sequence
    result.put("Model.attention_window", left, *reading.origins(*names))


def vocabulary(reading: Reading, result: Translation) -> None:
    """Tokenizer files, and the size of the vocabulary."""
    kind = reading.value("tokenizer_type", "GPT2BPETokenizer")
    if kind not in ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"):
        raise reading.error(
            "tokenizer_type",
            "must be GPT2BPETokenizer, HuggingFaceTokenizer or NullTokenizer; convert others with "
            "ppfleetx tokenizer or give a directory with tokenizer.json",
        )
    if kind == "HuggingFaceTokenizer" and "tokenizer_model" in reading:
        result.put("Data.tokenizer.dir", reading.text("tokenizer_model"), *reading.origins("tokenizer_model"))
    elif kind == "GPT2BPETokenizer" and ("vocab_file" in reading or "merge_file" in reading):
        for name, key in (("vocab_file", "vocab_file"), ("merge_file", "merges_file")):
            result.put(f"Data.tokenizer.{key}", reading.text(name), *reading.origins(name))
    size, origins, why = _vocab_size(reading, result, kind)
    result.put("Model.vocab_size", size, *origins, why=why)
    names = ("padded_vocab_size", "make_vocab_size_divisible_by", TENSOR)
    padded = reading.integer("padded_vocab_size", least=1)
    if padded is not None:
        unit = padded if "vocab_size" in reading else 1
    else:
        unit = reading.integer(names[1], 128, least=1) * reading.integer(TENSOR, 1, least=1)
    result.put("Model.vocab_size_divisible_unit", unit, *reading.origins(*names), why="so it is padded there")


def _vocab_size(reading: Reading, result: Translation, kind: str) -> tuple[int, Sequence[Given], str]:
    if "vocab_size" in reading:
        extra, why = (1, "NullTokenizer adds an end of document") if kind == "NullTokenizer" else (0, "")
        return reading.integer("vocab_size", least=1) + extra, reading.origins("vocab_size"), why
    if "padded_vocab_size" in reading:
        return reading.integer("padded_vocab_size", least=1), reading.origins("padded_vocab_size"), ""
    name = "tokenizer_model" if kind == "HuggingFaceTokenizer" else "vocab_file"
    if name not in reading:
        raise ConfigError(
            "is missing; it says how many tokens there are",
            key=option("vocab_size", result),
            place=result.place,
        )
    path, one = Path(reading.text(name)), reading.given[name]
    file = path / "tokenizer.json" if _is_directory(path) else path
    if not os.path.lexists(file) and file.name in _GPT2_WORDS:
        result.notes.append(
            f"{file} is not there: {_GPT2_WORDS[file.name]} tokens, those of GPT-2, are assumed"
        )
        return _GPT2_WORDS[file.name], [one], "GPT-2's"
    return highest_id(file, one) + 1, [one], "tokens in that file"


def data(reading: Reading, result: Translation) -> None:
    """Corpora, their shares, the length of samples and their masks."""
    evaluates = reading.integer("eval_iters", 100, least=0) > 0
    single = "data_path" in reading
    per_split = [name for name in ("train_data_path", "valid_data_path", "test_data_path") if name in reading]
    if single and per_split:
        raise reading.conflict(
            ("data_path", *per_split), "corpora are given for all splits or for each, not both"
        )
    if not single and "train_data_path" not in reading:
        raise ConfigError("is missing", key=option("data_path", result), place=result.place)
    split = reading.text("split", "969, 30, 1") if single else None
    if single and not _shares(split, reading)[1]:
        evaluates = False
    sources = {
        "Train": "data_path" if single else "train_data_path",
        "Eval": "data_path" if single else "valid_data_path",
    }
    for order, (section, name) in enumerate(sources.items()):
        if name not in reading or (section == "Eval" and not evaluates):
            continue
        own = [1.0 if place == order else 0.0 for place in range(3)]
        _split_data(reading, result, section, name, split or own)
    if evaluates and "Data.Eval.dataset.input_dir" in result.native:
        result.put(
            "Engine.eval_iters",
            reading.integer("eval_iters", 100),
            *reading.origins("eval_iters"),
            why="" if "eval_iters" in reading else "its default",
        )


def _split_data(reading: Reading, result: Translation, section: str, name: str, split: Any) -> None:
    prefix = f"Data.{section}.dataset"
    prefixes, weights = _corpora(reading, name)
    origins = reading.origins(name)
    result.put(f"{prefix}.input_dir", prefixes if len(prefixes) > 1 else prefixes[0], *origins)
    if weights is not None and len(prefixes) > 1:
        result.put(f"{prefix}.weights", weights, *origins)
    elif len(prefixes) > 1:
        result.put(f"{prefix}.blend", "exhaustive", *origins, why="without weights every sample is read once")
    why = "" if "split" in reading else "its default" if isinstance(split, str) else "all of it"
    result.put(f"{prefix}.split", split, *reading.origins("split"), why=why)
    result.put(
        f"{prefix}.max_seq_len", reading.integer("seq_length", least=1), *reading.origins("seq_length")
    )
    if "data_cache_path" in reading:
        result.put(
            f"{prefix}.cache_dir", reading.text("data_cache_path"), *reading.origins("data_cache_path")
        )
    for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if key in reading:
            result.put(f"{prefix}.{key}", reading.flag(key), *reading.origins(key))
    if "eos_token_id" in reading:
        result.put(
            f"{prefix}.eod_id", reading.integer("eos_token_id", least=0), *reading.origins("eos_token_id")
        )


def _shares(split: str, reading: Reading) -> tuple[float, float]:
    """The first two shares; what is no share at all is for the loader to refuse, with the same place."""
    try:
        numbers = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        return 1.0, 1.0
    return (*numbers, 0.0, 0.0)[0], (*numbers, 0.0, 0.0)[1]


def _corpora(reading: Reading, name: str) -> tuple[list[str], list[float] | None]:
    """Prefixes, and the weights before them where they are there: an even number of words, numbers first."""
    value = reading.value(name)
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    if not words:
        raise reading.error(name, "names no corpus")
    numbers = [_number(word) for word in words[::2]]
    if len(words) % 2 == 0 and all(number is not None for number in numbers):
        prefixes, weights = words[1::2], [number for number in numbers if number is not None]
    else:
        prefixes, weights = words, None
    for prefix in prefixes:
        if _is_directory(Path(prefix)):
            raise reading.error(
                name, f"{prefix} is a directory; name the pair of files in it without .bin or .idx"
            )
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _is_directory(path: Path) -> bool:
    """Whether it is one; not, where its name is none that a file can have."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for such names
