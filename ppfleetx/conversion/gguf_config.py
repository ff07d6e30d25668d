"""Convert between the metadata of GGUF files and Hugging Face's ``config.json``. An :class:`Architecture`
describes the conversion for one architecture of llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import LLAMA3, RopeScalingConfig
from ppfleetx.config.validate import section_of
from ppfleetx.conversion.gguf_tokenizer import special_id
from ppfleetx.conversion.huggingface.families import FAMILIES
from ppfleetx.conversion.huggingface.family import in_layers
from ppfleetx.conversion.huggingface.rope import DEFAULT_BASE
from ppfleetx.nn.rope_scaling import attention_factor, inverse_frequencies, longrope_attention_factor

Metadata = Mapping[str, Any]
_LLAMA3_FACTORS = "rope_freqs.weight"
_LONGROPE_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
ROPE_FACTORS = (_LLAMA3_FACTORS, *_LONGROPE_FACTORS.values())
"""Names of tensors that hold divisors of the rotary frequencies."""


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp describes the networks of one Hugging Face ``model_type``.

    Attributes:
        name: the value of ``general.architecture`` in the metadata.
        model_type: Hugging Face's ``model_type``.
        keys: key of ``config.json`` -> key of the metadata, without the architecture prefix.
        fixed: keys and values of ``config.json`` that are the same for all files of this architecture.
        names: entries that replace some of ``Family.names``, if llama.cpp stores several of Hugging Face's
            tensors as one.
        biases: key of ``config.json`` -> the tensor whose presence makes the key true.
        lacks: key of ``config.json`` -> the tensor whose absence makes the key true.
        rotary_part: the ``config.json`` key for the rotated fraction of each head; None: whole heads are
            rotated.
        rotates_pairs: whether llama.cpp pairs adjacent features for rotary embeddings. transformers pairs
            feature i with feature i + head size / 2.
        shifts_norms: whether transformers stores norm weights minus 1. llama.cpp stores the weights.
        window_period: the number of layers in a period, if only some layers have a sliding window. The last
            layer of each period has full attention. None: all layers are the same.
        num_layers_27b: for Gemma 2 and 3, the number of layers of the 27B model, by which llama.cpp
            recognizes it. The 27B model divides attention scores by sqrt(hidden size / heads), the other
            sizes by sqrt(head size). None for all other networks.
    """

    name: str
    model_type: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    rotary_part: str | None = None
    rotates_pairs: bool = False
    shifts_norms: bool = False
    window_period: int | None = None
    num_layers_27b: int | None = None


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
_QUERY_NORM = "blk.0.attn_q_norm.weight"
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
        {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        shifts_norms=True,
        window_period=2,
        num_layers_27b=46,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        _LLAMA | _WINDOW | _SOFTCAPS | {"rope_local_base_freq": "rope.freq_base_swa"},
        {"rope_local_base_freq": 10000.0},
        shifts_norms=True,
        window_period=6,
        num_layers_27b=62,
    ),
    Architecture("phi3", "phi3", _LLAMA | _WINDOW, rotary_part="partial_rotary_factor"),
    Architecture("olmo2", "olmo2", _LLAMA),
    Architecture(
        "starcoder2",
        "starcoder2",
        _LLAMA_WITHOUT_RMS | {"norm_epsilon": _LAYER_NORM},
        {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"},
    ),
    Architecture(
        "stablelm",
        "stablelm",
        _LLAMA_WITHOUT_RMS
        | {"layer_norm_eps": _LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        names=in_layers(
            "model.layers.{}.self_attn",
            {"attention.q_norm": "q_layernorm", "attention.k_norm": "k_layernorm"},
        ),
        biases={"use_qkv_bias": _QUERY_BIAS, "qk_layernorm": _QUERY_NORM},
        lacks={"use_parallel_residual": "blk.0.ffn_norm.weight"},
        rotary_part="partial_rotary_factor",
    ),
    Architecture(
        "command-r",
        "cohere",
        _LLAMA_WITHOUT_RMS | {"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
        biases={"use_qk_norm": _QUERY_NORM},
    ),
    Architecture(
        "cohere2",
        "cohere2",
        _LLAMA_WITHOUT_RMS | _WINDOW | {"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
        window_period=4,
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
BY_NAME = {one.name: one for one in _ARCHITECTURES}
BY_TYPE = {one.model_type: one for one in _ARCHITECTURES} | {"mistral": BY_NAME["llama"]}
_YARN_DEFAULTS = {"yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
_FLOATS = ("epsilon", "scale", "softcapping", "freq_base", "freq_base_swa")
"""Endings of metadata keys whose values llama.cpp reads as float32."""
_ENDS_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Tokens that end a response, even if the metadata do not name them as end tokens."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Metadata key after ``general.sampling.`` -> key of ``generation_config.json``."""


def config_of(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Build the ``config.json`` of the network in a GGUF file.

    Args:
        shapes: the shapes of the tensors, by llama.cpp's names.
        factors: the tensors named in ROPE_FACTORS that the file contains, by name.

    Raises CheckpointError if the network is not supported.
    """
    name = metadata.get("general.architecture")
    row = BY_NAME.get(name) if isinstance(name, str) else None
    if row is None:
        raise CheckpointError(
            f"general.architecture {shown(name)} is not supported; supported: {', '.join(BY_NAME)}"
        )
    if metadata.get(f"{name}.expert_count"):
        raise CheckpointError(
            "a mixture of experts is not read from GGUF; convert its Hugging Face directory"
        )
    if "token_embd.weight" not in shapes:
        raise CheckpointError("it lacks the tensor token_embd.weight")
    config = {
        "architectures": [FAMILIES[row.model_type].architecture],
        "model_type": row.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        **row.fixed,
    }
    for key, theirs in row.keys.items():
        value = _same_for_all_layers(metadata, f"{name}.{theirs}")
        if value is not None and theirs in _SIZES.values() and not (isinstance(value, int) and value > 0):
            raise CheckpointError(f"{name}.{theirs} {shown(value)} must be an integer of at least 1")
        if value is not None:
            config[key] = _shortest(value)
        elif theirs in _SIZES.values() or theirs.endswith("epsilon"):
            raise CheckpointError(f"its metadata lack {name}.{theirs}")
    config |= {key: tensor in shapes for key, tensor in row.biases.items()}
    config |= {key: tensor not in shapes for key, tensor in row.lacks.items()}
    config["tie_word_embeddings"] = "output.weight" not in shapes
    if "head_dim" in row.keys:
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", per_head)
        if row.num_layers_27b is not None:
            is_27b = config["num_hidden_layers"] == row.num_layers_27b
            config["query_pre_attn_scalar"] = per_head if is_27b else config["head_dim"]
        if "attention_multiplier" in row.keys:
            config.setdefault("attention_multiplier", config["head_dim"] ** -0.5)
    _add_window(config, metadata, row)
    _add_rope(config, metadata, row, factors)
    return config | _token_ids(metadata, config["vocab_size"])


def _same_for_all_layers(metadata: Metadata, key: str) -> Any:
    """Return the metadata value of ``key``. If the value is an array with one element per layer, all elements
    must be equal, and this element is returned. Raises CheckpointError if the elements differ."""
    value = metadata.get(key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise CheckpointError(f"{key} {shown(value)} is not the same for all layers")
    return value[0]


def _add_window(config: dict[str, Any], metadata: Metadata, row: Architecture) -> None:
    """Add the settings of the sliding window to ``config``: its size, and the layers that use it."""
    key = f"{row.name}.{_WINDOW['sliding_window']}"
    if not row.keys.keys() & _WINDOW:
        window = _same_for_all_layers(metadata, key)
        if window and window < metadata[f"{row.name}.context_length"]:
            raise CheckpointError(f"{key} {shown(window)}: {row.name} is read without a sliding window")
        return
    config["sliding_window"] = config.get("sliding_window") or None
    if row.window_period is None:
        return
    pattern, layers = metadata.get(f"{key}_pattern"), config["num_hidden_layers"]
    if config["sliding_window"] is None:
        pattern = [False] * layers
    elif isinstance(pattern, int):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]
    if pattern is None:
        return  # transformers' default pattern applies
    if len(pattern) != layers:
        raise CheckpointError(f"{key}_pattern has {len(pattern)} values, and the network {layers} layers")
    config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]


def _add_rope(
    config: dict[str, Any], metadata: Metadata, row: Architecture, factors: Mapping[str, np.ndarray]
) -> None:
    sizes = [config.get(key) for key in ("hidden_size", "num_attention_heads")]
    if None in sizes:
        return  # GPT-2, which has no rotary positions
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
    prefix = f"{row.name}.rope.scaling."
    if metadata.get(f"{prefix}finetuned") is False and row.name == "granite":
        raise CheckpointError(f"{prefix}finetuned is false: {row.name} without rotary positions is not read")
    for name, default in _YARN_DEFAULTS.items():
        if metadata.get(prefix + name, default) != default:
            raise CheckpointError(f"{prefix}{name} {shown(metadata[prefix + name])} is not supported")
    for name, one in factors.items():
        if one.shape != (turned // 2,):
            raise CheckpointError(f"{name} has not one factor for each of {turned // 2} rotary frequencies")
    is_longrope = all(name in factors for name in _LONGROPE_FACTORS.values())
    scaling = _scaling(metadata, prefix, is_longrope=is_longrope)
    if is_longrope:
        _add_longrope(config, metadata, prefix, factors)
    elif np.any(factors.get(_LLAMA3_FACTORS, 1) != 1):
        config["rope_scaling"] = _llama3(factors[_LLAMA3_FACTORS], head_dim, config["rope_theta"])
    elif scaling is not None:
        config["rope_scaling"] = scaling


def _scaling(metadata: Metadata, prefix: str, *, is_longrope: bool) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` of ``config.json``, converted from the metadata. None if the metadata
    describe no scaling. LongRoPE is converted by :func:`_add_longrope`, and the result here is None.

    Args:
        prefix: the prefix of the metadata keys, such as ``llama.rope.scaling.``.
        is_longrope: whether the file contains the tensors of LongRoPE's factors. LongRoPE without these
            tensors is not supported.
    """
    # Older files have only a factor, which llama.cpp reads as linear scaling.
    kind = metadata.get(f"{prefix}type", "linear")
    if kind == "none" or (kind == "linear" and not metadata.get(f"{prefix}factor")):
        return None
    if kind == "longrope" and is_longrope:
        return None
    if kind not in ("linear", "yarn") or metadata.get(f"{prefix}attn_factor", 1.0) != 1.0:
        raise CheckpointError(f"{prefix}type {shown(kind)} is not supported")
    names = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
    if kind == "yarn":
        names |= {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    given = {key: metadata.get(prefix + theirs) for key, theirs in names.items()}
    return {"rope_type": kind, **{key: _shortest(one) for key, one in given.items() if one is not None}}


def _add_longrope(
    config: dict[str, Any], metadata: Metadata, prefix: str, factors: Mapping[str, np.ndarray]
) -> None:
    """Add LongRoPE's settings to ``config``: the short and long factors, and the original context length. The
    short factors apply up to this length.

    Args:
        prefix: the prefix of the metadata keys, such as ``phi3.rope.scaling.``.
        factors: tensor name -> LongRoPE's factors.
    """
    original = metadata.get(f"{prefix}original_context_length")
    if not original:
        raise CheckpointError(f"its metadata lack {prefix}original_context_length")
    lists = {key: list(map(_shortest, factors[name].tolist())) for key, name in _LONGROPE_FACTORS.items()}
    config["original_max_position_embeddings"] = original
    config["rope_scaling"] = {"rope_type": "longrope", **lists}
    ratio, attention = config["max_position_embeddings"] / original, metadata.get(f"{prefix}attn_factor", 1.0)
    if not math.isclose(attention, longrope_attention_factor(ratio, original), rel_tol=1e-6):
        config["rope_scaling"]["attention_factor"] = _shortest(attention)


def _llama3(factors: np.ndarray, head_dim: int, base: float) -> dict[str, Any]:
    """Derive Llama 3's ``rope_scaling`` from the divisors of the rotary frequencies (``factors``).
    Raises CheckpointError if the divisors differ from those of Llama 3.1 to 3.3."""
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
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    of_turn = [number for number, token in enumerate(tokens) if token in _ENDS_OF_TURN]
    all_ends = (given["eos"], *metadata.get("tokenizer.ggml.eos_token_ids", ()), given["eot"], *of_turn)
    ends = [one for one in dict.fromkeys(all_ends) if one is not None and 0 <= one < vocab_size]
    ids = {
        "bos_token_id": given["bos"],
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": given["padding"],
    }
    return {key: value for key, value in ids.items() if value is not None}


def generation_config_of(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Build a ``generation_config.json`` from the sampling options of a GGUF file. None if there are no
    sampling options.

    Args:
        metadata: the metadata of the GGUF file.
        config: the ``config.json``, which provides the token ids.
    """
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


def metadata_of(config: Mapping[str, Any], row: Architecture, model: ModelConfig) -> dict[str, Any]:
    """Build the GGUF metadata that describe a network.

    Args:
        config: the ``config.json`` of the network.
        model: the ``Model`` section of the network.
    """
    found = {f"{row.name}.{theirs}": config.get(key) for key, theirs in row.keys.items()}
    made = {
        key: float(value) if key.endswith(_FLOATS) else value
        for key, value in found.items()
        if value is not None
    }
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
        if row.name != "phi3":  # where llama.cpp expects the factors in any case
            made[f"{row.name}.rope.scaling.type"] = "longrope"
    return made


def rope_factors(model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the divisors of the rotary frequencies that a GGUF file of ``model`` stores as tensors, by name.
    Only Llama 3 scaling and LongRoPE need such tensors. For other scalings, the metadata suffice."""
    scaling = model.rope_scaling
    if scaling is not None and scaling.type == "llama3":
        return {_LLAMA3_FACTORS: _rope_factors(scaling, model.head_size, model.rotary_base)}
    if scaling is not None and scaling.type == "longrope":
        lists = {name: getattr(scaling, key) for key, name in _LONGROPE_FACTORS.items()}
        return {name: np.array(factors, np.float32) for name, factors in lists.items()}
    return {}
