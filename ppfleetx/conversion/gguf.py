"""Read and write GGUF, llama.cpp's file format for network, weights and tokenizer. The conversion goes
through Hugging Face's format."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, cast, derive
from ppfleetx.checkpoint.weights import Weights, network_of, shown_reading
from ppfleetx.config.errors import CheckpointError, ConfigError, shown
from ppfleetx.config.resume_policy import network
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import LLAMA3, RopeScalingConfig
from ppfleetx.config.validate import section_of
from ppfleetx.conversion.gguf_tokenizer import special_id, tokenizer_metadata, tokenizer_texts
from ppfleetx.conversion.huggingface.config_export import differences, hf_config
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.families import FAMILIES
from ppfleetx.conversion.huggingface.generation_config import generation_defaults
from ppfleetx.conversion.huggingface.rope import DEFAULT_BASE
from ppfleetx.conversion.huggingface.tensor_mapping import rules
from ppfleetx.data.tokenizer.json_files import write_files
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.nn.rope_scaling import attention_factor, inverse_frequencies, longrope_attention_factor
from ppfleetx.utils.input_files import first_bytes, opened
from ppfleetx.utils.installed import NotInstalledError

SUFFIX = ".gguf"
QUANTIZED = ("q8_0", "q4_0", "q4_1")
"""The quantized element types that can be written. All types that the ``gguf`` library dequantizes can be
read."""
_MAGIC = b"GGUF"
_BLOCK = 32  # weights per quantization scale
_LLAMA3_FACTORS = "rope_freqs.weight"
_LONGROPE_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_ROPE_FACTORS = (_LLAMA3_FACTORS, *_LONGROPE_FACTORS.values())
_FLOATS = ("F32", "F16", "BF16")
_SUFFIXES = (".weight", ".bias")

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp describes the networks of one Hugging Face ``model_type``.

    Attributes:
        name: the value of ``general.architecture`` in the metadata.
        model_type: Hugging Face's ``model_type``.
        keys: key of ``config.json`` -> key of the metadata, without the architecture prefix.
        fixed: keys of ``config.json`` that have the same value for all files of this architecture.
        biases: key of ``config.json`` -> the tensor whose presence makes the key true.
        rotary_part: the ``config.json`` key for the rotated fraction of each head; None: whole heads rotate.
        rotates_pairs: llama.cpp rotates adjacent features of a head, and transformers its two halves.
        shifts_norms: llama.cpp stores the factors of norms, and transformers the factors less 1.
        scale_layers: a number of layers with which llama.cpp scales the scores by the hidden size per head
            instead of the size of a head, as in Gemma of 27 billion parameters.
    """

    name: str
    model_type: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    rotary_part: str | None = None
    rotates_pairs: bool = False
    shifts_norms: bool = False
    scale_layers: int | None = None


_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
_LLAMA_WITHOUT_RMS = {
    **_SIZES,
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
_LLAMA = _LLAMA_WITHOUT_RMS | {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_LAYER_NORM = "attention.layer_norm_epsilon"
_QUERY_BIAS, _UP_BIAS = "blk.0.attn_q.bias", "blk.0.ffn_up.bias"
_LLAMA_BIASES = {"attention_bias": _QUERY_BIAS, "mlp_bias": _UP_BIAS}
_SOFTCAPS = {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")}
_ARCHITECTURES = (
    Architecture("llama", "llama", _LLAMA, biases=_LLAMA_BIASES, rotates_pairs=True),
    Architecture("smollm3", "smollm3", _LLAMA, {"no_rope_layer_interval": 4}, rotates_pairs=True),
    Architecture(
        "granite",
        "granite",
        _LLAMA
        | {
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        biases=_LLAMA_BIASES,
        rotates_pairs=True,
    ),
    Architecture("gemma", "gemma", _LLAMA, shifts_norms=True),
    Architecture(
        "gemma2",
        "gemma2",
        _LLAMA | _WINDOW | _SOFTCAPS,
        {"sliding_window": 4096},
        shifts_norms=True,
        scale_layers=46,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        _LLAMA | _WINDOW | _SOFTCAPS | {"rope_local_base_freq": "rope.freq_base_swa"},
        {"rope_local_base_freq": 10000.0},
        shifts_norms=True,
        scale_layers=62,
    ),
    Architecture("phi3", "phi3", _LLAMA | _WINDOW, rotary_part="partial_rotary_factor"),
    Architecture("olmo2", "olmo2", _LLAMA),
    Architecture(
        "starcoder2",
        "starcoder2",
        _LLAMA_WITHOUT_RMS | {"norm_epsilon": _LAYER_NORM},
        {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"},
        biases={"use_bias": _QUERY_BIAS},
    ),
    Architecture(
        "stablelm",
        "stablelm",
        _LLAMA_WITHOUT_RMS
        | {"layer_norm_eps": _LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": _QUERY_BIAS},
        rotary_part="partial_rotary_factor",
    ),
    Architecture(
        "command-r",
        "cohere",
        _LLAMA_WITHOUT_RMS | {"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
        biases={"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    Architecture(
        "cohere2",
        "cohere2",
        _LLAMA_WITHOUT_RMS | _WINDOW | {"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
    ),
    Architecture("qwen2", "qwen2", _LLAMA, {"use_sliding_window": False}),
    Architecture("qwen3", "qwen3", _LLAMA, {"use_sliding_window": False, "attention_bias": False}),
    Architecture(
        "gpt2",
        "gpt2",
        {
            "n_embd": "embedding_length",
            "n_layer": "block_count",
            "n_head": "attention.head_count",
            "n_inner": "feed_forward_length",
            "n_positions": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        {"activation_function": "gelu_new"},
    ),
    Architecture(
        "gptneox",
        "gpt_neox",
        {
            **_SIZES,
            "layer_norm_eps": "attention.layer_norm_epsilon",
            "use_parallel_residual": "use_parallel_residual",
            "rotary_emb_base": "rope.freq_base",
        },
        {"hidden_act": "gelu_new"},
        rotary_part="rotary_pct",
    ),
)
_BY_NAME = {one.name: one for one in _ARCHITECTURES}
_BY_TYPE = {one.model_type: one for one in _ARCHITECTURES} | {"mistral": _BY_NAME["llama"]}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""``general.sampling.*`` -> key of ``generation_config.json``."""


# ---- in


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` is a file whose name ends in ``.gguf``, or that begins with GGUF's magic."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    with opened(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_gguf(path: str | Path) -> Weights:
    """Read the weights of a GGUF file lazily. If any of them is quantized, all are read as float32. Raises
    CheckpointError if the file is damaged or not supported; NotInstalledError if the ``gguf`` package is not
    installed."""
    path = Path(path)
    metadata, tensors = _opened(path)
    factors = {name: tensors.pop(name).read() for name in _ROPE_FACTORS if name in tensors}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    try:
        config = _config(metadata, shapes, factors)
        keys = model_keys(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    network_of(keys, str(path))
    names = _name_converter(config)
    ours = {}
    for rule in rules(config):
        parts = []
        for theirs, shape in zip(rule.theirs, rule.shapes, strict=True):
            name = names(theirs)
            wanted = shape[::-1] if _is_transposed(theirs, config) else shape
            if name not in tensors:
                raise CheckpointError(f"{path} lacks the tensor {name}")
            if shapes[name] != wanted:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(shapes[name])}, its metadata ask for {list(wanted)}"
                )
            parts.append(_in_hf_layout(tensors.pop(name), theirs, shape, config))
        ours[rule.ours] = derive(parts, rule.shape, rule.join, rule.ours)
    if tensors:
        raise CheckpointError(
            f"{path} holds tensors that this network does not have: {', '.join(sorted(tensors)[:4])}"
        )
    own = _generation_config(metadata, config)
    generation, notes = generation_defaults(own, config)
    source: dict[str, Any] = {"format": "hf", "config": config}
    if own is not None:
        source["generation_config"] = own
    return Weights(
        str(path),
        ours,
        model=keys,
        vocab_size=keys["vocab_size"],
        source=source,
        generation=generation,
        notes=tuple(notes),
    )


def extract_tokenizer(path: str | Path, directory: Path) -> Path:
    """Write the tokenizer of a GGUF file to ``directory``, in transformers' format. Returns ``directory``.
    Raises CheckpointError if the file is damaged, or this kind of tokenizer is not supported."""
    metadata, _ = _opened(Path(path))
    write_files(tokenizer_texts(metadata, str(path)), directory)
    return directory


def _library() -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        raise NotInstalledError(
            "gguf, which reads and writes GGUF files, is not installed in this Python: run "
            "`pip install 'ppfleetx[gguf]'`"
        ) from None
    return gguf


# Opening a file takes seconds if the vocabulary is large.
@lru_cache(maxsize=1)
def _reader(path: Path, version: tuple[int, ...]) -> Any:
    """Open a GGUF file. The result is cached until another file is opened.

    Args:
        version: numbers that change when the file changes, such as its size. The file is then opened again.
    """
    return _library().GGUFReader(path)


def _opened(path: Path) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    if first_bytes(path)[:4] != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
    try:
        stat = path.stat()
        reader = _reader(path, (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
        metadata = {key: one.contents() for key, one in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # errors that the library passes on
        raise CheckpointError(f"{path} is damaged or cut off: {error}") from error
    count = metadata.get("split.count", 1)
    if count > 1:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model; merge them with llama.cpp's llama-gguf-split --merge"
        )
    is_quantized = any(one.tensor_type.name not in _FLOATS for one in reader.tensors)
    return metadata, {one.name: _tensor(one, path, is_quantized) for one in reader.tensors}


def _tensor(stored: Any, path: Path, is_quantized: bool) -> LazyTensor:
    """Make a lazy tensor. If any tensor of the file is quantized, all are read as float32."""
    kind, shape = stored.tensor_type, tuple(int(size) for size in reversed(stored.shape))
    quants = _library().quants
    if kind.name not in _FLOATS:
        _, size = _library().GGML_QUANT_SIZES[kind]
        try:
            quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: {stored.name} has the element type {kind.name}, which is not read"
            ) from None
    if is_quantized or kind.name == "F32":
        return LazyTensor("F32", shape, lambda: quants.dequantize(stored.data, kind).reshape(shape))
    bits = np.uint16 if kind.name == "BF16" else np.float16
    return LazyTensor(kind.name, shape, lambda: stored.data.view(bits).reshape(shape))


def _config(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Build the ``config.json`` of the network in a GGUF file. Raises CheckpointError if it is not supported.

    Args:
        shapes: the shapes of the tensors, by llama.cpp's names.
        factors: tensors of the file that hold divisors of the rotary frequencies.
    """
    name = metadata.get("general.architecture")
    row = _BY_NAME.get(name) if isinstance(name, str) else None
    if row is None:
        raise CheckpointError(
            f"general.architecture {shown(name)} is not supported; supported: {', '.join(_BY_NAME)}"
        )
    if metadata.get(f"{name}.expert_count"):
        raise CheckpointError(
            "a mixture of experts is not read from GGUF; convert its Hugging Face directory"
        )
    window = f"{name}.{_WINDOW['sliding_window']}"
    if metadata.get(window) and not row.keys.keys() & _WINDOW:
        raise CheckpointError(f"{window} {shown(metadata[window])}: {name} is read without a sliding window")
    if "token_embd.weight" not in shapes:
        raise CheckpointError("it lacks the tensor token_embd.weight")
    config = {
        "architectures": [FAMILIES[row.model_type].architecture],
        "model_type": row.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        **row.fixed,
    }
    for key, theirs in row.keys.items():
        value = metadata.get(f"{name}.{theirs}")
        if value is not None:
            config[key] = _shortest(value)
        elif theirs in _SIZES.values() or theirs.endswith("epsilon"):
            raise CheckpointError(f"its metadata lack {name}.{theirs}")
    if row.keys.keys() & _WINDOW:
        config["sliding_window"] = config.get("sliding_window") or None
    config |= {key: tensor in shapes for key, tensor in row.biases.items()}
    config["tie_word_embeddings"] = "output.weight" not in shapes
    if "head_dim" in row.keys and "num_attention_heads" in config:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if row.scale_layers is not None and "num_attention_heads" in config:
        per_head = config["hidden_size"] // config["num_attention_heads"]
        is_scaled = config["num_hidden_layers"] == row.scale_layers
        config["query_pre_attn_scalar"] = per_head if is_scaled else config.get("head_dim", per_head)
    _add_rope(config, metadata, row, factors)
    return config | _token_ids(metadata, config["vocab_size"])


def _add_rope(
    config: dict[str, Any], metadata: Metadata, row: Architecture, factors: Mapping[str, np.ndarray]
) -> None:
    sizes = [config.get(key) for key in ("hidden_size", "num_attention_heads")]
    if None in sizes:
        return  # GPT-2, which has no rotary positions, or a network with missing keys, reported by its family
    head_dim = config.get("head_dim") or sizes[0] // sizes[1]
    if "rope_theta" in row.keys:
        config.setdefault("rope_theta", DEFAULT_BASE)
    turned = metadata.get(f"{row.name}.rope.dimension_count", head_dim)
    if row.rotary_part is not None:
        config[row.rotary_part] = turned / head_dim
    elif turned != head_dim:
        raise CheckpointError(
            f"{row.name}.rope.dimension_count {turned}: only whole heads ({head_dim}) can be rotated"
        )
    said = f"{row.name}.rope.scaling."
    # Older files have only a factor, which llama.cpp reads as linear scaling.
    kind = metadata.get(f"{said}type", "linear" if metadata.get(f"{said}factor") else "none")
    if kind != "none":
        if kind not in ("linear", "yarn") or metadata.get(f"{said}attn_factor", 1.0) != 1.0:
            raise CheckpointError(f"{said}type {shown(kind)} is not supported")
        names = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
        if kind == "yarn":
            names |= {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        given = {key: metadata.get(said + theirs) for key, theirs in names.items()}
        config["rope_scaling"] = {
            "rope_type": kind,
            **{key: _shortest(value) for key, value in given.items() if value is not None},
        }
    if all(name in factors for name in _LONGROPE_FACTORS.values()):
        original = metadata.get(f"{said}original_context_length")
        if original is None:
            raise CheckpointError(f"its metadata lack {said}original_context_length")
        config["original_max_position_embeddings"] = original
        config["rope_scaling"] = {
            "rope_type": "longrope",
            **{key: list(map(_shortest, factors[name].tolist())) for key, name in _LONGROPE_FACTORS.items()},
        }
        ratio = config["max_position_embeddings"] / original
        attention = metadata.get(f"{said}attn_factor", 1.0)
        if not math.isclose(attention, longrope_attention_factor(ratio, original), rel_tol=1e-6):
            config["rope_scaling"]["attention_factor"] = _shortest(attention)
    elif np.any(factors.get(_LLAMA3_FACTORS, 1) != 1):
        config["rope_scaling"] = _llama3(factors[_LLAMA3_FACTORS], head_dim, config["rope_theta"])


def _llama3(factors: np.ndarray, head_dim: int, base: float) -> dict[str, Any]:
    """Find the settings of Llama 3's rotary scaling from the divisors of the rotary frequencies."""
    scaling = {"factor": _shortest(float(factors.max())), **LLAMA3}
    section = section_of(RopeScalingConfig, {"type": "llama3", **scaling})
    if not np.allclose(_rope_factors(section, head_dim, base), factors, rtol=1e-4):
        raise CheckpointError(
            f"{_LLAMA3_FACTORS} is not the scaling of Llama 3.1 to 3.3, the only one that is read"
        )
    return {"rope_type": "llama3", **scaling}


def _rope_factors(scaling: RopeScalingConfig, head_dim: int, base: float) -> np.ndarray:
    plain, stretched = (inverse_frequencies(head_dim, base, one) for one in (None, scaling))
    return (plain / stretched).astype(np.float32)


def _token_ids(metadata: Metadata, vocab_size: int) -> dict[str, Any]:
    given = {kind: special_id(metadata, kind, vocab_size) for kind in ("bos", "eos", "eot", "padding")}
    ends = [one for one in dict.fromkeys((given["eos"], given["eot"])) if one is not None]
    ids = {
        "bos_token_id": given["bos"],
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": given["padding"],
    }
    return {key: value for key, value in ids.items() if value is not None}


def _generation_config(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    given = {key: metadata.get(f"general.sampling.{theirs}") for theirs, key in _SAMPLING.items()}
    said = {key: _shortest(value) for key, value in given.items() if value is not None}
    if not said:
        return None
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    return {"do_sample": said.get("temperature") != 0, **said, **ids}


def _shortest(value: Any) -> Any:
    """Round a float to 7 significant digits, the precision of float32. Other values are returned
    unchanged."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _name_converter(config: Mapping[str, Any]) -> Any:
    library, row = _library(), _BY_TYPE[config["model_type"]]
    kind = next(one for one, name in library.MODEL_ARCH_NAMES.items() if name == row.name)
    table = library.get_tensor_name_map(kind, config.get("num_hidden_layers") or config["n_layer"])

    def name(theirs: str) -> str:
        found = table.get_name(theirs, try_suffixes=_SUFFIXES)
        assert found is not None, theirs
        return found

    return name


def _is_transposed(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor is ``[in, out]`` in transformers and ``[out, in]`` in llama.cpp."""
    return config["model_type"] == "gpt2" and ".h." in name


def _in_hf_layout(
    stored: LazyTensor, name: str, shape: tuple[int, ...], config: Mapping[str, Any]
) -> LazyTensor:
    return LazyTensor(stored.dtype, shape, lambda: _reshaped(stored.read(), name, config, to_file=False))


def _reshaped(array: np.ndarray, name: str, config: Mapping[str, Any], *, to_file: bool) -> np.ndarray:
    """Convert the tensor ``name`` to llama.cpp's layout if ``to_file``, else to Hugging Face's."""
    kind, rest = config["model_type"], array.shape[1:]
    row = _BY_TYPE[kind]
    if row.shifts_norms and name.endswith("norm.weight"):
        return array + 1 if to_file else array - 1
    if row.rotates_pairs and (found := re.search(r"self_attn\.([qk])_proj", name)):
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        halves = (2, -1) if to_file else (-1, 2)
        return array.reshape(heads, *halves, *rest).swapaxes(1, 2).reshape(array.shape)
    if _is_transposed(name, config):
        return array.T
    if kind == "gpt_neox" and "query_key_value" in name:
        # llama.cpp stores all queries, then all keys, then all values; transformers groups them by head.
        groups = (config["num_attention_heads"], 3) if to_file else (3, config["num_attention_heads"])
        return array.reshape(*groups, -1, *rest).swapaxes(0, 1).reshape(array.shape)
    return array


# ---- out


def write_gguf(
    tensors: Mapping[str, LazyTensor],
    model: ModelConfig,
    path: str | Path,
    *,
    tokenizer: Tokenizer,
    dtype: str | None = None,
    source: Mapping[str, Any] | None = None,
) -> None:
    """Write a GGUF file that llama.cpp can run.

    Args:
        tensors: all parameters of ``model`` by ppfleetx's names, including vocabulary padding.
        tokenizer: the tokenizer to store in the file.
        dtype: the element type of most matrices, one of QUANTIZED; None keeps the types of ``tensors``.
            Vectors and position embeddings are always float32.
        source: facts about the origin of the weights (``Weights.source``), if they came from Hugging Face or
            GGUF.

    Raises CheckpointError if llama.cpp does not support the network or the tokenizer.
    """
    library, path = _library(), Path(path)
    kinds = library.GGMLQuantizationType
    config = hf_config(model, "F32", original=(source or {}).get("config"))
    row = _BY_TYPE.get(config["model_type"])
    if row is None:
        raise CheckpointError(
            f"this network is a {config['model_type']}, which cannot be written as GGUF; supported: "
            f"{', '.join(_BY_TYPE)}"
        )
    # The config.json that the weights came with may leave out keys with default values.
    config = FAMILIES[config["model_type"]].config(config["model_type"], model, network(model)) | config
    names = _name_converter(config)
    theirs: dict[str, LazyTensor] = {}
    for rule in rules(config):
        for index, name in enumerate(rule.theirs):
            theirs[names(name)] = _part(rule, tensors[rule.ours], index, name, config)
    factors = _add_factors(model, theirs)
    metadata = _metadata(config, row, model)
    _check_same(model, metadata, theirs, factors)
    types = {name: kinds[_stored_type(name, tensor, dtype)] for name, tensor in theirs.items()}
    kind = dtype or next(iter(theirs.values())).dtype
    metadata |= {
        "general.type": "model",
        "general.name": path.stem,
        "general.file_type": int(library.LlamaFileType[_FILE_TYPES[kind]]),
        "general.quantization_version": library.GGML_QUANT_VERSION,
        **tokenizer_metadata(tokenizer, model.vocab_size),
    }
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        writer = library.GGUFWriter(Path(scratch) / path.name, row.name)
        for key, value in metadata.items():
            _add(writer, key, value)
        for name, tensor in theirs.items():
            block, size = library.GGML_QUANT_SIZES[types[name]]
            num_bytes = int(np.prod(tensor.shape)) // block * size
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), num_bytes, types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with shown_reading(theirs, "writing") as reading:
            for name, tensor in reading.items():
                values = np.ascontiguousarray(cast(tensor.read(), tensor.dtype, "F32"))
                writer.write_tensor_data(library.quants.quantize(values, types[name]))
        writer.close()
        (Path(scratch) / path.name).replace(path)


_FILE_TYPES = {
    "F32": "ALL_F32",
    "F16": "MOSTLY_F16",
    "BF16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
    "q4_1": "MOSTLY_Q4_1",
}


def _part(rule: Any, tensor: LazyTensor, index: int, name: str, config: Mapping[str, Any]) -> LazyTensor:
    shape, dtype = rule.shapes[index], "F32" if len(rule.shapes[index]) == 1 else tensor.dtype

    def read() -> np.ndarray:
        part = cast(rule.split(tensor.read(), index), tensor.dtype, dtype)
        return _reshaped(part, name, config, to_file=True)

    return LazyTensor(dtype, shape[::-1] if _is_transposed(name, config) else shape, read)


def _stored_type(name: str, tensor: LazyTensor, dtype: str | None) -> str:
    """Choose the element type of a tensor in the GGUF file, as llama.cpp does. Vectors and position
    embeddings are float32. If ``dtype`` is None, other tensors keep their type. Otherwise, matrices get the
    type ``dtype``, with two exceptions: rows that do not divide into blocks become float16, and the word
    embedding and the head become 8-bit."""
    if len(tensor.shape) == 1 or name.startswith("position_embd"):
        return "F32"
    if dtype is None:
        return tensor.dtype
    if tensor.shape[-1] % _BLOCK:
        return "F16"
    return "Q8_0" if name in ("token_embd.weight", "output.weight") else dtype.upper()


def _metadata(config: Mapping[str, Any], row: Architecture, model: ModelConfig) -> dict[str, Any]:
    found = {f"{row.name}.{theirs}": config.get(key) for key, theirs in row.keys.items()}
    made = {key: value for key, value in found.items() if value is not None}
    made |= {"general.architecture": row.name, f"{row.name}.vocab_size": model.vocab_size}
    if model.position_embedding_type == "rope":
        turned = round(model.head_size * model.rotary_percent)
        made |= {f"{row.name}.rope.dimension_count": turned, f"{row.name}.rope.freq_base": model.rotary_base}
    if "head_dim" in row.keys:
        made[f"{row.name}.attention.value_length"] = made[f"{row.name}.attention.key_length"] = (
            model.head_size
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.type in ("linear", "yarn"):
        said = {
            "type": scaling.type,
            "factor": scaling.factor,
            "original_context_length": scaling.original_max_position_embeddings,
            "yarn_beta_fast": scaling.beta_fast if scaling.type == "yarn" else None,
            "yarn_beta_slow": scaling.beta_slow if scaling.type == "yarn" else None,
        }
        made |= {f"{row.name}.rope.scaling.{key}": one for key, one in said.items() if one is not None}
    elif scaling is not None and scaling.type == "longrope":
        original = scaling.original_max_position_embeddings
        made[f"{row.name}.rope.scaling.original_context_length"] = original
        made[f"{row.name}.rope.scaling.attn_factor"] = attention_factor(scaling)
    return made


def _add_factors(model: ModelConfig, tensors: dict[str, LazyTensor]) -> dict[str, np.ndarray]:
    """Add the divisors of the rotary frequencies to ``tensors``, and return them. There are none without
    scaling, or if the metadata describe it."""
    scaling, made = model.rope_scaling, {}
    if scaling is not None and scaling.type == "llama3":
        made = {_LLAMA3_FACTORS: _rope_factors(scaling, model.head_size, model.rotary_base)}
    elif scaling is not None and scaling.type == "longrope":
        lists = {name: getattr(scaling, key) for key, name in _LONGROPE_FACTORS.items()}
        made = {name: np.array(factors, np.float32) for name, factors in lists.items()}
    for name, factors in made.items():
        tensors[name] = LazyTensor("F32", factors.shape, lambda factors=factors: factors)
    return made


def _check_same(
    model: ModelConfig,
    metadata: Metadata,
    tensors: Mapping[str, LazyTensor],
    factors: Mapping[str, np.ndarray],
) -> None:
    """Raise CheckpointError if reading the GGUF file back would give another network than ``model``."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    try:
        found: Iterable[str] = differences(_config(metadata, shapes, factors), model)
    except (CheckpointError, ConfigError) as error:
        found = [str(error)]
    if reasons := ", ".join(found):
        raise CheckpointError(f"this network cannot be written as GGUF: {reasons}")


def _add(writer: Any, key: str, value: Any) -> None:
    if key == "general.architecture":
        return  # the writer adds this key
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
