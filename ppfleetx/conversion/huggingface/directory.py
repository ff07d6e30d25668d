"""Read and write Hugging Face model directories."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.config_and_tokenizer import copy_tokenizer, tokenizer_files
from ppfleetx.checkpoint.lazy_tensors import KeptTensor, LazyTensor
from ppfleetx.checkpoint.slices import Index
from ppfleetx.checkpoint.weights import Weights, network_of, shown_reading
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.message_text import counted
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.config_export import hf_config
from ppfleetx.conversion.huggingface.config_import import model_keys, unknown_keys, without_paddle_keys
from ppfleetx.conversion.huggingface.families import FAMILIES
from ppfleetx.conversion.huggingface.generation_config import generation_defaults
from ppfleetx.conversion.huggingface.gptq_awq import QUANTIZATION, dequantized
from ppfleetx.conversion.huggingface.moe_families import NEXT_TOKENS
from ppfleetx.conversion.huggingface.paddlenlp import to_hf_layout
from ppfleetx.conversion.huggingface.read_files import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION_CONFIG,
    read_generation_config,
    read_hf_config,
    read_stored,
)
from ppfleetx.conversion.huggingface.rope import rope_notes
from ppfleetx.conversion.huggingface.tensor_mapping import Rule, expert_loads, network, rules
from ppfleetx.conversion.safetensors_file import write_sharded
from ppfleetx.utils.output_files import atomic_write

MAX_FILE_BYTES = 5 * 1000**3
_OTHER_HEAD = {"embed_out.weight": "lm_head.weight"}
_HEADS = {*_OTHER_HEAD, *_OTHER_HEAD.values(), "output.weight"}


def read_hf(directory: str | Path) -> Weights:
    """Read a Hugging Face model directory, or a Llama that PaddleNLP or PaddleFormers wrote. Tensors are
    read lazily, and quantized weights are dequantized. Raises CheckpointError if files are missing or
    damaged, or if the network is not supported."""
    directory = Path(directory)
    config, files = read_hf_config(directory), read_stored(directory)
    keys = _model_keys(config, files.tensors, directory)
    in_out = FAMILIES[config["model_type"]].has_in_out_linears
    stored = dequantized(to_hf_layout(files, config, keys, directory), config, directory, in_out=in_out)
    config = {key: value for key, value in config.items() if key != QUANTIZATION}
    tensors = expert_loads(network(config))
    used: dict[str, str] = {}  # name in the files -> our parameter
    for rule in rules(config):
        is_tied = rule.ours == "embedding.word_embeddings.weight" and keys["tie_word_embeddings"]
        others = _HEADS if is_tied else ()  # of tied tensors, safetensors' save_model keeps only one
        theirs = [_name_in_files(stored, name, directory, others) for name in rule.theirs]
        used |= dict.fromkeys(theirs, rule.ours)
        tensors[rule.ours] = rule.joined([stored[name] for name in theirs], directory)
    left_over = stored.keys() - used.keys()
    next_tokens = _of_next_tokens(left_over, config, keys)
    words = next(tensor for tensor, ours in used.items() if ours == "embedding.word_embeddings.weight")
    _check_left_over(
        left_over - next_tokens, stored, directory, tied_to=words if keys["tie_word_embeddings"] else None
    )
    kept = without_paddle_keys(config, keys) | ({NEXT_TOKENS: 0} if next_tokens else {})
    weights = as_weights(directory, tensors, keys, kept, read_generation_config(directory))
    return replace(
        weights,
        tokenizer_dir=directory if tokenizer_files(directory) else None,
        notes=(
            *_notes(config),
            *weights.notes,
            *[_WITHOUT_NEXT_TOKENS] * bool(next_tokens),
            *[_WITHOUT_ADAPTERS] * (directory / ADAPTER_CONFIG).is_file(),
        ),
    )


def as_weights(
    place: Path,
    tensors: Mapping[str, LazyTensor],
    keys: Mapping[str, Any],
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
) -> Weights:
    """Make a :class:`Weights` from tensors and the configuration files of Hugging Face.

    Args:
        place: the source of the tensors, for messages.
        tensors: the parameters, by ppfleetx's names.
        keys: the `Model` section.
        config: the ``config.json``. It is kept for a later export to Hugging Face's format.
        generation_config: the ``generation_config.json``; None if there is none.
    """
    generation, notes = generation_defaults(generation_config, config)
    source: dict[str, Any] = {"format": "hf", "config": config}
    if generation_config is not None:
        source["generation_config"] = generation_config
    return Weights(
        str(place),
        tensors,
        model=keys,
        vocab_size=keys["vocab_size"],
        source=source,
        generation=generation,
        notes=tuple(notes),
    )


def _notes(config: Mapping[str, Any]) -> list[str]:
    kind = config["model_type"]
    notes = rope_notes(config) if kind != "gpt2" else []
    if config.get("auto_map"):
        notes.append(
            f"config.json names its own program (auto_map), which is not run: it is read as a {kind}"
        )
    if unknown := unknown_keys(config):
        notes.append(
            f"config.json has keys that are not known for a {kind} and are ignored, as in "
            f"transformers: {', '.join(shown(key) for key in unknown)}"
        )
    return notes


def _model_keys(
    config: Mapping[str, Any], stored: Mapping[str, LazyTensor], directory: Path
) -> dict[str, Any]:
    try:
        keys = model_keys(config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    model = network_of(keys, str(directory / CONFIG))
    if model.num_layers > len(stored):  # check before spending time and memory on each layer
        raise CheckpointError(
            f"{directory / CONFIG} says {counted(model.num_layers, 'layer')}, but the files have "
            f"{counted(len(stored), 'tensor')}"
        )
    return keys


def write_hf(
    tensors: Mapping[str, LazyTensor],
    model: ModelConfig,
    directory: str | Path,
    *,
    source: Mapping[str, Any] | None = None,
    tokenizer_dir: Path | None = None,
    token_ids: Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a model directory that ``transformers`` can load.

    Args:
        tensors: all parameters of `model`, by ppfleetx's names. Vocabulary padding is included.
        source: ``Weights.source`` of the weights. It can contain the original ``generation_config.json``,
            which is written unchanged, and the original ``config.json``, which is used if it describes
            `model`.
        tokenizer_dir: the directory of the tokenizer files to copy; None: copy none.
        token_ids: `bos_token_id` and `eos_token_id` of that tokenizer.
        max_file_bytes: maximum size of a weight file. If the weights are larger, they are split into
            several files with an index. A tensor that is larger than this size gets a file of its own.

    Raises CheckpointError if no Hugging Face model type can express `model`.
    """
    directory = Path(directory)
    (dtype, _), *_ = Counter(tensor.dtype for tensor in tensors.values()).most_common()
    source = source or {}
    config = hf_config(model, dtype, original=source.get("config"), token_ids=token_ids)
    theirs: dict[str, LazyTensor] = {}
    for rule in rules(config):
        theirs |= _split(rule, tensors[rule.ours])
    directory.mkdir(parents=True, exist_ok=True)
    with shown_reading(theirs, "writing") as reading:
        write_sharded(directory, reading, max_bytes=max_file_bytes, metadata={"format": "pt"})
    _write_json(directory / CONFIG, config)
    ids = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    made = {"_from_model_config": True} | {key: value for key, value in ids.items() if value is not None}
    _write_json(directory / GENERATION_CONFIG, source.get("generation_config") or made)
    if tokenizer_dir is not None:
        copy_tokenizer(tokenizer_dir, directory)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path, "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def _name_in_files(
    stored: Mapping[str, LazyTensor], name: str, directory: Path, others: Collection[str] = ()
) -> str:
    """Return the name of a tensor in the files. It can differ from ``name``, transformers' name for the
    tensor. ``others`` are further names under which it can be stored. Raises CheckpointError if the files do
    not contain the tensor."""
    # Files that were saved without a head omit the prefix (GPT-2, BLOOM, OPT). GPT-NeoX's head has two names.
    for candidate in (name, name.partition(".")[2], _OTHER_HEAD.get(name, name), *others):
        if candidate in stored:
            return candidate
    longer = next((one for one in stored if one.endswith(f".{name}")), None)
    hint = ""
    if longer is not None:
        hint = (
            f", but has {shown(longer)}: the model was saved with a wrapper around it (PEFT, DDP, "
            "torch.compile). Save the model inside, and adapters merged"
        )
    elif name in _HEADS:
        hint = ", the head: the files are of a model that does not predict tokens, or their head is tied and "
        hint += "config.json lacks tie_word_embeddings: true"
    raise CheckpointError(f"{directory} lacks the tensor {name}{hint}")


def _split(rule: Rule, tensor: LazyTensor) -> dict[str, LazyTensor]:
    whole = KeptTensor(tensor, readings=len(rule.theirs))

    def part(index: int, shape: Index) -> LazyTensor:
        return LazyTensor(tensor.dtype, shape, lambda: rule.split(whole.read(), index))

    return {name: part(index, rule.shapes[index]) for index, name in enumerate(rule.theirs)}


_WITHOUT_ADAPTERS = (
    f"its adapters of PEFT ({ADAPTER_CONFIG}) are left out; merge them with the model if they belong to it"
)
_WITHOUT_NEXT_TOKENS = (
    f"its layers that predict several tokens ({NEXT_TOKENS} in config.json) are left out, as in transformers"
)


def _of_next_tokens(names: Collection[str], config: Mapping[str, Any], keys: Mapping[str, Any]) -> set[str]:
    """Return those of ``names`` that belong to multi-token prediction layers, which are numbered after the
    model's own layers."""
    further = FAMILIES[config["model_type"]].without_aliases(config).get(NEXT_TOKENS) or 0
    layers = tuple(f"model.layers.{keys['num_layers'] + number}." for number in range(further))
    return {name for name in names if name.startswith(layers)}


def _check_left_over(
    names: Collection[str], stored: Mapping[str, LazyTensor], directory: Path, *, tied_to: str | None
) -> None:
    """Raise CheckpointError if the files contain a tensor that the network does not have. Three kinds are
    ignored: buffers, biases that are all zero, and a tied head that equals the word embedding.

    Args:
        names: the names of the tensors that no parameter uses.
        stored: all tensors, by name.
        tied_to: the name of the word embedding, if the head is tied to it; else None.
    """
    known = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    known += (".attention.bias", ".attention.masked_bias")  # GPT-NeoX's
    tied = _HEADS.intersection(names) if tied_to is not None else set()
    unknown = sorted(name for name in names if name not in tied and not name.endswith(known))
    # Older versions of AutoGPTQ write a bias for every linear layer.
    unknown = [name for name in unknown if not (name.endswith(".bias") and not stored[name].read().any())]
    if unknown:
        raise CheckpointError(
            f"{directory} holds tensors that this network does not have: {', '.join(unknown[:4])}"
        )
    for head in tied:
        if (stored[head].read() != stored[tied_to].read()).any():
            raise CheckpointError(
                f"{directory}: config.json ties the head to the word embedding, but their values differ"
            )
