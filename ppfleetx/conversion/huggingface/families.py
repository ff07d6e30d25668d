"""The networks of Hugging Face that ours can be, one row each: its keys of ``config.json`` and its names of
tensors, with ours.

To add one: a :class:`Family` in :data:`FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.rope import PLACES, hf_neox_rope, hf_rope, rope_keys

Config = Mapping[str, Any]
NEEDED = object()
"""The default of a key that has to be there."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes:
        architecture: the class in transformers.
        keys: key of ``config.json`` -> keys of our ``Model`` section (one, or several separated by spaces)
            and the default in transformers: a value, a function of the configuration, or NEEDED.
        fixed: keys of ours that all networks of this type have alike.
        names: our layers -> its layers. ``{}`` is the number of a block. ``{part}`` stands for the parts of a
            fused layer (q, k, v; gate, up), where they are tensors of their own.
        read: further keys of ours, from a ``config.json`` without nulls.
        write: further keys of a ``config.json``, from a ``Model`` section.
        also_read: the keys that ``read`` looks at.
        has_in_out_linears: linears are stored as ``[in, out]``, like ours; else as ``[out, in]``.
        has_parts_in_a_row: a fused layer has all queries, then all keys, then all values; else they are
            interleaved per head, like ours.
        required: keys that must be there, if only as null, because their default in transformers is a size of
            one particular model.
        off: keys that are accepted at these values only, beside those of all families.
    """

    architecture: str
    keys: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any]
    names: Mapping[str, str]
    read: Callable[[Config], dict[str, Any]] = lambda _: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda _: {}
    also_read: Collection[str] = ()
    has_in_out_linears: bool = False
    has_parts_in_a_row: bool = False
    required: Collection[str] = ()
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def mapped(self) -> set[str]:
        """The keys of ``config.json`` that decide something here."""
        return {*self.keys, *self.also_read}

    def model_keys(self, config: Config) -> dict[str, Any]:
        """Keys of our ``Model`` section for a ``config.json`` without nulls.

        Raises:
            CheckpointError: a key is missing, or says what our layers cannot do.
        """
        made = dict(self.fixed)
        for theirs, (ours, default) in self.keys.items():
            value = config.get(theirs, default)
            if value is NEEDED:
                raise CheckpointError(f"config.json lacks {theirs}")
            made |= dict.fromkeys(ours.split(), value(config) if callable(value) else value)
        return made | self.read(config)

    def config(self, model_type: str, model: ModelConfig, values: Mapping[str, Any]) -> dict[str, Any]:
        """The ``config.json`` of this family that comes nearest to a network.

        Args:
            model_type: the family's name.
            model: the network.
            values: what its keys stand for where they are null (``resume_policy.network``).
        """
        made = {"architectures": [self.architecture], "model_type": model_type}
        for theirs, (ours, _) in self.keys.items():
            key = ours.split()[0]
            made[theirs] = getattr(model, key) if values.get(key) is None else values[key]
        return made | self.write(model)


# ---- what several of them share

_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
"""Activations without a gate: transformers' name to ours."""


def _activation(config: Config, key: str, default: str) -> dict[str, Any]:
    name = config.get(key, default)
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"{key} {shown(name)} of this {config['model_type']} is not supported")
    return {"hidden_act": _ACTIVATIONS[name]}


def _activation_name(model: ModelConfig) -> str | None:
    return next((theirs for theirs, ours in _ACTIVATIONS.items() if ours == model.hidden_act), None)


def _check_heads(config: Config) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "head_dim" not in config and hidden % heads:
        raise CheckpointError(f"config.json: {heads} heads do not divide the hidden size {hidden}")


_INIT = ("initializer_range", 0.02)
_SIZES = {
    "vocab_size": ("vocab_size", NEEDED),
    "hidden_size": ("hidden_size", NEEDED),
    "num_hidden_layers": ("num_layers", NEEDED),
    "num_attention_heads": ("num_attention_heads", NEEDED),
    "intermediate_size": ("ffn_hidden_size", NEEDED),
    "max_position_embeddings": ("max_position_embeddings", NEEDED),
    "initializer_range": _INIT,
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
}
_ROPE = {*PLACES, "original_max_position_embeddings"}

# ---- GPT-2

# Names under which transformers takes GPT-2's sizes as well.
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def with_gpt2_sizes(config: Config) -> dict[str, Any]:
    """A ``config.json`` of GPT-2 with its sizes under GPT-2's own names."""
    made = dict(config)
    for alias, name in _GPT2_ALIASES.items():
        if alias in made and made.setdefault(name, made[alias]) != made[alias]:
            one, two = shown(made[alias]), shown(made[name])
            raise CheckpointError(f"config.json: {alias} ({one}) and {name} ({two}) are one size")
    return made


_GPT2 = Family(
    "GPT2LMHeadModel",
    keys={
        "vocab_size": ("vocab_size", NEEDED),
        "n_embd": ("hidden_size", NEEDED),
        "n_layer": ("num_layers", NEEDED),
        "n_head": ("num_attention_heads", NEEDED),
        "n_inner": ("ffn_hidden_size", lambda config: 4 * config["n_embd"]),
        "n_positions": ("max_position_embeddings", NEEDED),
        "layer_norm_epsilon": ("norm_epsilon", 1e-5),
        "initializer_range": _INIT,
        "resid_pdrop": ("hidden_dropout_prob", 0.1),
        "attn_pdrop": ("attention_probs_dropout_prob", 0.1),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    fixed={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    names={
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.layers.{}.input_norm": "transformer.h.{}.ln_1",
        "decoder.layers.{}.attention.qkv": "transformer.h.{}.attn.c_attn",
        "decoder.layers.{}.attention.out_proj": "transformer.h.{}.attn.c_proj",
        "decoder.layers.{}.mlp_norm": "transformer.h.{}.ln_2",
        "decoder.layers.{}.mlp.fc1": "transformer.h.{}.mlp.c_fc",
        "decoder.layers.{}.mlp.fc2": "transformer.h.{}.mlp.c_proj",
        "decoder.final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    read=lambda config: _activation(config, "activation_function", "gelu_new"),
    write=lambda model: {
        "activation_function": _activation_name(model),
        "embd_pdrop": model.embedding_dropout,
    },
    also_read={"activation_function", *_GPT2_ALIASES},
    has_in_out_linears=True,
    has_parts_in_a_row=True,
    off={
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
        "position_embedding_type": ("absolute", "learned"),
    },
)

# ---- Llama and its relatives


def _llama_like(config: Config) -> dict[str, Any]:
    _check_heads(config)
    return rope_keys(config)


def _mistral(config: Config) -> dict[str, Any]:
    return _llama_like(config) | _window(config, config.get("sliding_window"))


def _qwen(config: Config) -> dict[str, Any]:
    return _llama_like(config) | _window(config, _qwen_window(config))


def _qwen_window(config: Config) -> int | None:
    """The window of all layers; None: there is none, or none that is shorter than the longest sequence."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    layers, first = config["num_hidden_layers"], config.get("max_window_layers", 28)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [
            "full_attention" if window is None or i < first else "sliding_attention" for i in range(layers)
        ]
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"config.json: layer_types {shown(kinds)} of this {config['model_type']} is not supported"
        )
    windowed = kinds.count("sliding_attention")
    if windowed and window is None:
        raise CheckpointError(
            "config.json: layer_types has sliding_attention, and use_sliding_window is not true"
        )
    if not windowed or window >= config["max_position_embeddings"]:
        return None
    if windowed < layers:
        raise CheckpointError(
            f"config.json: {windowed} of {layers} layers have a window of {window} tokens "
            "(use_sliding_window, max_window_layers, layer_types). Either all layers have the same window, "
            f"or none has. For sequences of up to {window} tokens the window changes nothing: to use the "
            "model for those, set use_sliding_window to false, take out layer_types, and set "
            f"max_position_embeddings to {window}"
        )
    return window


def _window(config: Config, window: int | None) -> dict[str, Any]:
    """``attention_window``: theirs counts the position itself, ours those before it."""
    if window is None or window >= config["max_position_embeddings"]:
        return {"attention_window": None}
    if window == 1:
        raise CheckpointError(
            "config.json: sliding_window 1 is not supported: a token would see itself alone"
        )
    return {"attention_window": window - 1}


def _hf_window(model: ModelConfig) -> int | None:
    return None if model.attention_window is None else model.attention_window + 1


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": "silu", **hf_rope(model)}


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    return {**_write_llama(model), "sliding_window": _hf_window(model)}


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    window = _hf_window(model)
    made = {**_write_llama(model), "use_sliding_window": window is not None, "sliding_window": window}
    return made if window is None else made | {"max_window_layers": 0}


_LLAMA_KEYS = {
    **_SIZES,
    "num_key_value_heads": ("num_query_groups", lambda config: config["num_attention_heads"]),
    "head_dim": ("head_dim", lambda config: config["hidden_size"] // config["num_attention_heads"]),
    "rms_norm_eps": ("norm_epsilon", 1e-6),
    # PaddleFormers leaves the key out where it is true, everybody else where it is false.
    "tie_word_embeddings": ("tie_word_embeddings", lambda config: "paddleformers_version" in config),
}
_LLAMA_FIXED = {
    "hidden_act": "swiglu",
    "hidden_dropout_prob": 0.0,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "add_out_proj_bias": False,
    "add_mlp_bias": False,
}
_LLAMA_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.layers.{}.input_norm": "model.layers.{}.input_layernorm",
    "decoder.layers.{}.attention.qkv": "model.layers.{}.self_attn.{part}_proj",
    "decoder.layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "decoder.layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "decoder.layers.{}.attention.out_proj": "model.layers.{}.self_attn.o_proj",
    "decoder.layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "decoder.layers.{}.mlp.fc1": "model.layers.{}.mlp.{part}_proj",
    "decoder.layers.{}.mlp.fc2": "model.layers.{}.mlp.down_proj",
    "decoder.final_norm": "model.norm",
    "head": "lm_head",
}
_LLAMA_READ = _ROPE | {"rope_theta", "partial_rotary_factor"}
_QWEN_READ = _LLAMA_READ | {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_ATTENTION_BIAS = {"attention_bias": ("add_qkv_bias add_out_proj_bias", False)}
_SILU = {"hidden_act": ("silu", "swish")}

# ---- GPT-NeoX


def _neox(config: Config) -> dict[str, Any]:
    _check_heads(config)
    return {**_activation(config, "hidden_act", "gelu"), **rope_keys(config)}


_NEOX = Family(
    "GPTNeoXForCausalLM",
    keys={
        **_SIZES,
        "layer_norm_eps": ("norm_epsilon", 1e-5),
        "hidden_dropout": ("hidden_dropout_prob", 0.0),
        "attention_bias": ("add_qkv_bias add_out_proj_bias", True),
        "use_parallel_residual": ("parallel_residual", True),
        "tie_word_embeddings": ("tie_word_embeddings", False),
    },
    fixed={
        "position_embedding_type": "rope",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "add_mlp_bias": True,
    },
    names={
        "embedding.word_embeddings": "gpt_neox.embed_in",
        "decoder.layers.{}.input_norm": "gpt_neox.layers.{}.input_layernorm",
        "decoder.layers.{}.attention.qkv": "gpt_neox.layers.{}.attention.query_key_value",
        "decoder.layers.{}.attention.out_proj": "gpt_neox.layers.{}.attention.dense",
        "decoder.layers.{}.mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "decoder.layers.{}.mlp.fc1": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "decoder.layers.{}.mlp.fc2": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "decoder.final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    read=_neox,
    write=lambda model: {"hidden_act": _activation_name(model), **hf_neox_rope(model)},
    also_read=_ROPE | {"hidden_act", "rotary_pct", "rotary_emb_base"},
)

FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "llama": Family(
        "LlamaForCausalLM",
        _LLAMA_KEYS | _ATTENTION_BIAS | {"mlp_bias": ("add_mlp_bias", False)},
        _LLAMA_FIXED,
        _LLAMA_NAMES,
        _llama_like,
        _write_llama,
        _LLAMA_READ,
        off=_SILU,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_FIXED | {"add_qkv_bias": True},
        _LLAMA_NAMES,
        _qwen,
        _write_qwen,
        _QWEN_READ,
        required=("num_key_value_heads",),
        off=_SILU,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA_KEYS | _ATTENTION_BIAS,
        _LLAMA_FIXED | {"qk_layernorm": True},
        _LLAMA_NAMES,
        _qwen,
        _write_qwen,
        _QWEN_READ,
        required=("num_key_value_heads", "head_dim"),
        off=_SILU,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_FIXED,
        _LLAMA_NAMES,
        _mistral,
        _write_mistral,
        _LLAMA_READ | {"sliding_window"},
        required=("num_key_value_heads", "sliding_window"),
        off=_SILU,
    ),
    "gpt_neox": _NEOX,
}
"""By ``model_type``. A network is written as the first of them that can express it."""
