"""Translation rules for Megatron arguments that depend on each other: the network, its vocabulary and its
data. The rules for training are in :mod:`ppfleetx.dialects.megatron.training_rules`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.data import split_shares
from ppfleetx.config.sections.rope import LLAMA3
from ppfleetx.dialects.translation import Translation
from ppfleetx.dialects.user_options import UserOption, weighted_corpora

COMMAND_LINE = "the command line"
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr")
# Vocabulary size by file name, assumed if the vocabulary file does not exist yet.
_GPT2_WORDS = {"gpt2-vocab.json": 50257}
# The argument that names the directory of the tokenizer, by tokenizer type; the second is MindSpeed-LLM's.
_DIRECTORY_OF = {"HuggingFaceTokenizer": "tokenizer_model", "PretrainedFromHF": "tokenizer_name_or_path"}


def required(run: Translation) -> None:
    """Raise ConfigError if an argument that Megatron requires was not given."""
    absent = [name for name in REQUIRED if name not in run]
    if "train_iters" not in run and "train_samples" not in run:
        absent.append("train_iters")
    if absent:
        first, *others = (option(name, run) for name in absent)
        rule = f"is missing, and so are {', '.join(others)}" if others else "is missing"
        raise ConfigError(rule, key=first, place=run.place)


def option(name: str, run: Translation) -> str:
    """Return an option's name as the user would write it: ``--num-layers``, or ``num_layers`` in a file."""
    return f"--{name.replace('_', '-')}" if run.place == COMMAND_LINE else name


def network(run: Translation) -> None:
    _heads(run)
    _positions(run)
    _norms(run)
    _activation(run)
    _window(run)


def _heads(run: Translation) -> None:
    if run.flag("multi_latent_attention", False):
        _latent_heads(run)
        return
    run.put("Model.head_dim", run.integer("kv_channels", least=1), "kv_channels")
    run.put("Model.qk_layernorm", run.flag("qk_layernorm"), "qk_layernorm")
    names = ("group_query_attention", "num_query_groups")
    groups = run.integer("num_query_groups", 1, least=1)
    if run.flag("group_query_attention", False):
        run.put("Model.num_query_groups", groups, *names)
    elif "num_query_groups" in run and groups != 1:
        run.notes.append(
            f"num_query_groups {groups} has no effect without group_query_attention, as in Megatron"
        )


def _latent_heads(run: Translation) -> None:
    """Translate Megatron's options for multi-head latent attention. The rotary embedding of latent attention
    rotates pairs of neighboring features, as in DeepSeek."""
    name = "multi_latent_attention"
    if not run.flag("qk_layernorm", False):
        raise run.error(name, "needs qk_layernorm: compressed vectors are always normalized")
    for key, theirs, default in (
        ("q_rank", "q_lora_rank", None),
        ("kv_rank", "kv_lora_rank", 32),
        ("nope_head_dim", "qk_head_dim", 128),
        ("rope_head_dim", "qk_pos_emb_head_dim", 64),
        ("value_head_dim", "v_head_dim", 128),
    ):
        run.put(f"Model.latent_attention.{key}", run.integer(theirs, default, least=1), theirs, name)
    run.put("Model.rotary_interleaved", True, name)


def _positions(run: Translation) -> None:
    key = "Model.position_embedding_type"
    kind = run.native[key].value if key in run.native else None
    if kind not in ("rope", "alibi") and run.flag("no_position_embedding", False):
        run.replace(key, "none", "position_embedding_type", "no_position_embedding")
    if run.flag("use_alibi_position_embeddings", False) and not run.flag("no_query_key_layer_scaling", False):
        # With layer scaling, Megatron divides the QK products by the layer number, adds ALiBi, and multiplies
        # the sum by the layer number.
        raise run.error(
            "use_alibi_position_embeddings",
            "needs no_query_key_layer_scaling: without it the biases of layer n are n times as steep there; "
            "position_embedding_type alibi has the same biases in all layers",
        )
    if "max_position_embeddings" not in run:
        why, length = "max_position_embeddings is not given", run.integer("seq_length", least=1)
        run.put("Model.max_position_embeddings", length, "seq_length", why=why)
    _rope_scaling(run)


def _norms(run: Translation) -> None:
    key, kind = "Model.normalization", run.native.get("Model.normalization")
    kind = "LayerNorm" if kind is None else kind.value
    names = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
    if True in [run.flag(name, False) for name in names]:
        run.replace(key, f"{kind}1P", "normalization", *names)
    name, epsilons = "embed_layernorm", ("norm_epsilon", "layernorm_epsilon")
    if not run.flag(name, False):
        return
    if kind != "LayerNorm" or any(run.number(one, 1e-5) != 1e-5 for one in epsilons):
        raise run.conflict(
            (name, "normalization", *epsilons),
            "is always a LayerNorm with epsilon 1e-5; here all norms must be of the same kind",
        )
    run.put("Model.embedding_norm", True, name)


def _rope_scaling(run: Translation) -> None:
    interpolation = run.number("rotary_seq_len_interpolation_factor", 1.0, least=1.0)
    kinds = ("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_type")
    names = (*kinds, "rope_scaling_factor", *LLAMA3)
    chosen = run.flag("use_rope_scaling", False), run.choice("rope_scaling_type", ("llama3",)) is not None
    if sum((interpolation != 1, *chosen)) > 1:
        raise run.conflict(kinds, "only one kind of rope scaling can be used; give one of these")
    if chosen[1]:
        wanted = ("rope_scaling_factor", *LLAMA3)
        if absent := [name for name in wanted if name not in run]:
            raise run.error("rope_scaling_type", f"needs {', '.join(option(name, run) for name in absent)}")
        scaling: dict[str, Any] = {
            "type": "llama3",
            "factor": run.number("rope_scaling_factor"),
            **{name: run.value(name) for name in LLAMA3},
        }
    elif chosen[0]:
        scaling = {
            "type": "llama3",
            "factor": run.number("rope_scaling_factor", 8.0),
            **LLAMA3,
        }
    elif interpolation != 1:
        scaling = {"type": "linear", "factor": interpolation}
    else:
        return
    run.put("Model.rope_scaling", scaling, *names)


def _activation(run: Translation) -> None:
    unfused = ("no_bias_gelu_fusion", "disable_bias_linear")
    if "Model.hidden_act" not in run.native and any(run.flag(name, False) for name in unfused):
        why = "where bias and GeLU are not fused, Megatron's GeLU is the exact one"
        run.put("Model.hidden_act", "gelu_exact", *unfused, why=why)


def _window(run: Translation) -> None:
    names = ("pre_tockens", "next_tockens")
    run.integer("next_tockens", 0, least=0)
    left = run.integer("pre_tockens", least=1)
    if left is None or left >= run.integer("seq_length", least=1) - 1:
        return  # the window covers the whole sequence
    run.put("Model.attention_window", left, *names)


def vocabulary(run: Translation) -> None:
    """Translate Megatron's options for the tokenizer's files and the vocabulary size."""
    kind = run.value("tokenizer_type", "GPT2BPETokenizer")
    if kind not in ("GPT2BPETokenizer", "NullTokenizer", *_DIRECTORY_OF):
        raise run.error(
            "tokenizer_type",
            "must be GPT2BPETokenizer, HuggingFaceTokenizer, PretrainedFromHF or NullTokenizer; convert "
            "others with ppfleetx tokenizer or give a directory with tokenizer.json",
        )
    directory = _DIRECTORY_OF.get(kind)
    if directory in run:
        run.put("Data.tokenizer.dir", run.text(directory), directory)
    elif kind == "GPT2BPETokenizer" and ("vocab_file" in run or "merge_file" in run):
        for name, key in (("vocab_file", "vocab_file"), ("merge_file", "merges_file")):
            run.put(f"Data.tokenizer.{key}", run.text(name), name)
    size, origins, why = _vocab_size(run, kind)
    run.put("Model.vocab_size", size, *origins, why=why)
    names = ("padded_vocab_size", "make_vocab_size_divisible_by", TENSOR)
    padded = run.integer("padded_vocab_size", least=1)
    if padded is not None:
        unit = padded if "vocab_size" in run else 1
    else:
        unit = run.integer(names[1], 128, least=1) * run.integer(TENSOR, 1, least=1)
    run.put("Model.vocab_size_divisible_unit", unit, *names, why="so it is padded there")


def _vocab_size(run: Translation, kind: str) -> tuple[int, Sequence[UserOption], str]:
    if "vocab_size" in run:
        extra, why = (1, "NullTokenizer adds an end of document") if kind == "NullTokenizer" else (0, "")
        return run.integer("vocab_size", least=1) + extra, run.origins("vocab_size"), why
    if "padded_vocab_size" in run:
        return run.integer("padded_vocab_size", least=1), run.origins("padded_vocab_size"), ""
    name = _DIRECTORY_OF.get(kind, "vocab_file")
    if name not in run:
        raise ConfigError(
            "is missing; it says how many tokens there are",
            key=option("vocab_size", run),
            place=run.place,
        )
    path, one = Path(run.text(name)), run.given[name]
    file = path / "tokenizer.json" if os.path.isdir(path) else path  # noqa: PTH112 (Path.is_dir raises PermissionError)
    if not os.path.lexists(file) and file.name in _GPT2_WORDS:
        run.notes.append(f"{file} does not exist: GPT-2's {_GPT2_WORDS[file.name]} tokens are assumed")
        return _GPT2_WORDS[file.name], [one], "GPT-2's"
    return highest_id(file, one) + 1, [one], "tokens in that file"


def data(run: Translation) -> None:
    """Translate Megatron's options for data: the corpora, their weights and splits, the sequence length, the
    attention and loss masks, and the number of evaluation batches."""
    evaluates = run.integer("eval_iters", 100, least=0) > 0
    single = "data_path" in run
    per_split = [name for name in ("train_data_path", "valid_data_path", "test_data_path") if name in run]
    if single and per_split:
        raise run.conflict(
            ("data_path", *per_split), "corpora are given for all splits or for each, not both"
        )
    if not single and "train_data_path" not in run:
        raise ConfigError("is missing", key=option("data_path", run), place=run.place)
    split = run.text("split", "969, 30, 1") if single else None
    if single and not _evaluation_share(split):
        evaluates = False
    for order, (section, own_name) in enumerate((("Train", "train_data_path"), ("Eval", "valid_data_path"))):
        name = "data_path" if single else own_name
        if name not in run or (section == "Eval" and not evaluates):
            continue
        own = [1.0 if place == order else 0.0 for place in range(3)]
        _split_data(run, section, name, split or own)
    if evaluates and "Data.Eval.dataset.input_dir" in run.native:
        run.put("Engine.eval_iters", run.integer("eval_iters", 100), "eval_iters")


def _split_data(run: Translation, section: str, name: str, split: Any) -> None:
    prefix = f"Data.{section}.dataset"
    prefixes, weights = _corpora(run, name)
    origins = run.origins(name)
    run.put(f"{prefix}.input_dir", prefixes if len(prefixes) > 1 else prefixes[0], *origins)
    if weights is not None and len(prefixes) > 1:
        run.put(f"{prefix}.weights", weights, *origins)
    elif len(prefixes) > 1:
        run.put(f"{prefix}.blend", "exhaustive", *origins, why="without weights every sample is read once")
    why = "" if "split" in run else "its default" if isinstance(split, str) else "all of it"
    run.put(f"{prefix}.split", split, "split", why=why)
    run.put(f"{prefix}.max_seq_len", run.integer("seq_length", least=1), "seq_length")
    run.put(f"{prefix}.cache_dir", run.text("data_cache_path"), "data_cache_path")
    for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        run.put(f"{prefix}.{key}", run.flag(key), key)
    run.put(f"{prefix}.eod_id", run.integer("eos_token_id", least=0), "eos_token_id")


def _evaluation_share(split: str) -> float:
    """Return the share of the evaluation data, which is the second number of Megatron's ``split``. Returns
    1.0 if ``split`` is invalid."""
    try:
        return (*split_shares(split), 0.0, 0.0)[1]
    except ValueError:
        return 1.0  # the configuration loader reports an invalid split later


def _corpora(run: Translation, name: str) -> tuple[list[str], list[float] | None]:
    value = run.value(name)
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    if not words:
        raise run.error(name, "names no corpus")
    prefixes, weights = weighted_corpora(words)
    for prefix in prefixes:
        if os.path.isdir(prefix):  # noqa: PTH112 (Path.is_dir raises PermissionError)
            raise run.error(
                name, f"{prefix} is a directory; name the pair of files in it without .bin or .idx"
            )
    return prefixes, weights


def highest_id(file: Path, file_option: UserOption) -> int:
    """Return the highest token id in ``file``, which is a ``vocab.json`` or a ``tokenizer.json``.
    ``file_option`` is the user's option that names the file, for error messages."""
    try:
        ids = _ids(json.loads(file.read_text(encoding="utf-8")))
    except OSError as problem:
        rule = f"cannot be read: {problem.strerror}; the size of the vocabulary is in it (or --vocab-size)"
        raise ConfigError(f"{file} {rule}", key=file_option.key, place=file_option.place) from None
    except (ValueError, TypeError, KeyError, RecursionError):  # not JSON, or JSON of another shape
        ids = []
    if not ids or not all(type(number) is int and 0 <= number < 2**31 for number in ids):
        rule = "is not a vocabulary in JSON: a mapping of tokens to their ids"
        raise ConfigError(f"{file} {rule}", key=file_option.key, place=file_option.place)
    return max(ids)


def _ids(read: Any) -> list[Any]:
    if not isinstance(read, dict) or not isinstance(read.get("model"), dict):
        return list(read.values()) if isinstance(read, dict) else []
    words, added = read["model"].get("vocab", {}), read.get("added_tokens") or []
    # The vocabulary of a unigram model is a list, in which a token's index is its id.
    return [
        *(words.values() if isinstance(words, dict) else range(len(words))),
        *(one["id"] for one in added),
    ]
