"""The model types with networks similar to Llama: gated MLPs, rotary positions, and RMSNorm or LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.family import (
    ATTENTION_BIAS,
    EMBEDDING_DROPOUT,
    EPSILON,
    LLAMA,
    MLP_BIAS,
    PARTIAL_ROTARY,
    PERIOD,
    ROTARY,
    TIED,
    WINDOW,
    Config,
    Family,
    Feature,
    hf_pattern,
    hf_rope_by_kind,
    hf_window,
    in_layers,
    pattern,
    pattern_keys,
    rope_by_kind,
    rotary,
    rotary_keys,
    window_keys,
)
from ppfleetx.conversion.huggingface.rope import hf_rope

_LAYER = "model.layers.{}"
_NUM_KV_HEADS = ("num_key_value_heads",)
_SIZES_OF_HEADS = ("num_key_value_heads", "head_dim")
_GATE_AND_UP = in_layers(_LAYER, {"mlp.fc1": "mlp.gate_up_proj"})

# ---- Qwen


def _qwen_window(config: Config) -> dict[str, Any]:
    """Convert the settings of the sliding window of Qwen models: its size, and which layers use it."""
    layers, first = config["num_hidden_layers"], config.get("max_window_layers", 28)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if window is None and "sliding_attention" in config.get("layer_types", ()):
        raise CheckpointError(
            "config.json: layer_types has sliding_attention, and use_sliding_window is not true"
        )
    without = layers if window is None else first
    kinds = ["full_attention" if layer < without else "sliding_attention" for layer in range(layers)]
    keys = pattern_keys({"layer_types": kinds, **config, "sliding_window": window}, layers)
    if len(keys.get("attention_window_layers", ())) in (0, layers):
        return window_keys(config, window if keys["attention_window"] else None)
    return keys


def _write_qwen_window(model: ModelConfig) -> dict[str, Any]:
    window = hf_window(model)
    made = {"use_sliding_window": window is not None, "sliding_window": window}
    return made if window is None else made | hf_pattern(model) | {"max_window_layers": 0}


_QWEN_WINDOW = Feature(
    {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"},
    _qwen_window,
    _write_qwen_window,
)

# ---- Gemma 1, 2 and 3 (text): norms scale by 1 + weight; scaled embeddings, soft-capped logits, local layers

_TANH = ("gelu_pytorch_tanh", "gelu_new")


def _gemma(config: Config) -> dict[str, Any]:
    # Early files have hidden_act = "gelu", which transformers always treats as the tanh approximation.
    for key, known in (("hidden_activation", _TANH), ("hidden_act", (*_TANH, "gelu"))):
        name = config.get(key, _TANH[0])
        if name not in known:
            raise CheckpointError(f"{key} {shown(name)} of this {config['model_type']} is not supported")
    return {"embedding_multiplier": math.sqrt(config["hidden_size"])}


def _write_scale(model: ModelConfig) -> dict[str, Any]:
    scalar = (model.attention_multiplier or model.head_size**-0.5) ** -2
    # transformers 5 accepts only integers here.
    return {"query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar)) else scalar}


_SCALE = Feature(
    {"query_pre_attn_scalar"},
    lambda config: {"attention_multiplier": config.get("query_pre_attn_scalar", 256) ** -0.5},
    _write_scale,
)
_GEMMA = LLAMA.variant(
    "GemmaForCausalLM",
    Feature({"hidden_act", "hidden_activation"}, _gemma, lambda _: dict.fromkeys(_GEMMA_KEYS, _TANH[0])),
    keys=ATTENTION_BIAS | TIED,
    fixed={"hidden_act": "geglu_tanh", "normalization": "RMSNorm1P"},
    required=_SIZES_OF_HEADS,
    off={"use_bidirectional_attention": (False,)},
)
_GEMMA_KEYS = ("hidden_act", "hidden_activation")
_GEMMA2 = _GEMMA.variant(
    "Gemma2ForCausalLM",
    _SCALE,
    keys={
        "attn_logit_softcapping": ("attn_logit_softcapping", None),
        "final_logit_softcapping": ("final_logit_softcapping", None),
    },
    fixed={"sandwich_norm": True},
    names=in_layers(
        _LAYER,
        {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
)

# ---- Granite and MiniCPM: multipliers of embeddings, residual branches and logits


def _minicpm(config: Config) -> dict[str, Any]:
    keys = {"embedding_multiplier": config.get("scale_emb", 1)}
    keys["residual_multiplier"] = config.get("scale_depth", 1) / math.sqrt(config["num_hidden_layers"])
    if "dim_model_base" in config:
        keys["logits_multiplier"] = config["dim_model_base"] / config["hidden_size"]
    return keys


def _write_minicpm(model: ModelConfig) -> dict[str, Any]:
    return {
        "scale_emb": model.embedding_multiplier,
        "scale_depth": model.residual_multiplier * math.sqrt(model.num_layers),
        "dim_model_base": model.logits_factor * model.hidden_size,
    }


# ---- Cohere: parallel attention and MLP after one norm without a bias


def _norms_of_heads(key: str) -> Feature:
    """Make a :class:`Feature` that converts the bool ``key`` of ``config.json`` to ``qk_layernorm``. True
    becomes ``each_head``: every head has its own norm weights."""

    def read(config: Config) -> dict[str, Any]:
        theirs = config.get(key, False)
        return {"qk_layernorm": "each_head" if theirs is True else theirs}

    return Feature({key}, read, lambda model: {key: model.qk_layernorm == "each_head"})


_COHERE = LLAMA.variant(
    "CohereForCausalLM",
    ROTARY,
    without=("rms_norm_eps",),
    keys=ATTENTION_BIAS
    | TIED
    | {"layer_norm_eps": ("norm_epsilon", 1e-5), "logit_scale": ("logits_multiplier", 0.0625)},
    fixed={
        "normalization": "LayerNormNoBias",
        "parallel_residual": True,
        "shared_input_norm": True,
        "rotary_interleaved": True,
    },
)


def _cohere2(config: Config, pattern: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rotary_layers`` for Cohere 2. Layers with a sliding window use rotary embeddings, and all
    other layers have no position encoding."""
    return {"rotary_layers": pattern.get("attention_window_layers", ())}


# ---- GLM

_GLM = LLAMA.variant(
    "GlmForCausalLM",
    PARTIAL_ROTARY,
    keys={"attention_bias": ("add_qkv_bias", True), "rms_norm_eps": ("norm_epsilon", 1.5625e-7)},
    fixed={"rotary_interleaved": True, "sandwich_norm": False},
    names=_GATE_AND_UP,
    has_parts_in_a_row=True,
    required=_SIZES_OF_HEADS,
)

# ---- StableLM, SmolLM3


def _stablelm(config: Config) -> dict[str, Any]:
    return dict.fromkeys(
        ("parallel_residual", "shared_input_norm"), config.get("use_parallel_residual", False)
    )


def _smollm3(config: Config) -> dict[str, Any]:
    layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    if len(rotates) != layers:
        raise CheckpointError(
            f"config.json: no_rope_layers {shown(rotates)} is not one number for each layer"
        )
    turning = [layer for layer, rotate in enumerate(rotates) if rotate]
    return {} if len(turning) == layers else {"rotary_layers": turning}


# ---- OLMo: norms after each branch, and over the queries and keys of all heads


def _olmo3(config: Config, pattern: Mapping[str, Any]) -> dict[str, Any]:
    base = config.get("rope_theta", 5e5)
    return rope_by_kind(config, pattern, base=base, local=base)


_OLMO = LLAMA.variant(
    "Olmo2ForCausalLM",
    keys=ATTENTION_BIAS | EPSILON,
    fixed={"qk_layernorm": "all_heads", "sandwich_norm": True, "pre_norm": False},
    names=in_layers(
        _LAYER,
        {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
)

# ---- Baichuan


def _baichuan(config: Config) -> dict[str, Any]:
    """Convert the position settings of Baichuan: rotary embeddings for 7B, ALiBi for 13B. The 13B model is
    recognized by the absence of ``max_position_embeddings``."""
    if config.get("vocab_size", 0) > 100_000:
        raise CheckpointError(
            "this is a Baichuan 2, which normalizes the rows of its head at each pass; that is not built"
        )
    if "max_position_embeddings" in config:
        return rotary_keys(config)
    longest = config.get("model_max_length", 4096)
    return {"position_embedding_type": "alibi", "max_position_embeddings": longest}


def _write_baichuan(model: ModelConfig) -> dict[str, Any]:
    length = "model_max_length" if model.positions.biases else "max_position_embeddings"
    return {length: model.max_position_embeddings}


LLAMA_KIN: dict[str, Family] = {
    "llama": LLAMA.variant("LlamaForCausalLM", ROTARY, keys=ATTENTION_BIAS | MLP_BIAS),
    "qwen2": LLAMA.variant(
        "Qwen2ForCausalLM",
        ROTARY,
        _QWEN_WINDOW,
        fixed={"add_qkv_bias": True},
        required=_NUM_KV_HEADS,
    ),
    "qwen3": LLAMA.variant(
        "Qwen3ForCausalLM",
        ROTARY,
        _QWEN_WINDOW,
        keys=ATTENTION_BIAS,
        fixed={"qk_layernorm": True},
        required=_SIZES_OF_HEADS,
    ),
    "mistral": LLAMA.variant(
        "MistralForCausalLM", ROTARY, WINDOW, required=("num_key_value_heads", "sliding_window")
    ),
    "gemma": _GEMMA.variant("GemmaForCausalLM", ROTARY),
    "gemma2": _GEMMA2.variant(
        "Gemma2ForCausalLM",
        ROTARY,
        pattern(2),
        # If these keys are missing, transformers uses default limits; null means no limit.
        required=(*_SIZES_OF_HEADS, "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": _GEMMA2.variant(
        "Gemma3ForCausalLM",
        Feature({*ROTARY.reads, "rope_local_base_freq"}, write=hf_rope),
        pattern(
            6,
            period=PERIOD,
            also=lambda config, found: rope_by_kind(
                config, found, base=1e6, local=config.get("rope_local_base_freq", 1e4)
            ),
        ),
        Feature(write=lambda model: {"rope_local_base_freq": model.local_rotary_base or model.rotary_base}),
        without=("attn_logit_softcapping",),
        fixed={"qk_layernorm": True},
        off={"attn_logit_softcapping": ()},
    ),
    "granite": LLAMA.variant(
        "GraniteForCausalLM",
        ROTARY,
        Feature(
            {"logits_scaling"},
            lambda config: {"logits_multiplier": 1 / config.get("logits_scaling", 1.0)},
            lambda model: {"logits_scaling": 1 / model.logits_factor},
        ),
        keys=ATTENTION_BIAS
        | MLP_BIAS
        | {
            "embedding_multiplier": ("embedding_multiplier", 1.0),
            "residual_multiplier": ("residual_multiplier", 1.0),
            "attention_multiplier": ("attention_multiplier", 1.0),
        },
    ),
    "minicpm": LLAMA.variant(
        "MiniCPMForCausalLM",
        ROTARY,
        Feature({"scale_emb", "scale_depth", "dim_model_base"}, _minicpm, _write_minicpm),
        keys=TIED,
    ),
    "cohere": _COHERE.variant("CohereForCausalLM", rotary(5e5), _norms_of_heads("use_qk_norm")),
    "cohere2": _COHERE.variant(
        "Cohere2ForCausalLM",
        pattern(4, period=PERIOD, also=_cohere2),
        off={"position_embedding_type": ("rope_gptj",), "rotary_pct": (1, 1.0)},
    ),
    "glm": _GLM,
    "glm4": _GLM.variant(
        "Glm4ForCausalLM",
        fixed={"sandwich_norm": True},
        names=in_layers(
            _LAYER,
            {
                "attention_post_norm": "post_self_attn_layernorm",
                "mlp_post_norm": "post_mlp_layernorm",
            },
        ),
    ),
    "stablelm": LLAMA.variant(
        "StableLmForCausalLM",
        PARTIAL_ROTARY,
        Feature(
            {"use_parallel_residual"},
            _stablelm,
            lambda model: {"use_parallel_residual": model.parallel_residual},
        ),
        _norms_of_heads("qk_layernorm"),
        required=_NUM_KV_HEADS,
        without=("rms_norm_eps",),
        keys={
            "layer_norm_eps": ("norm_epsilon", 1e-5),
            "use_qkv_bias": ("add_qkv_bias", False),
            "hidden_dropout": ("hidden_dropout_prob", 0.0),
        },
        fixed={"normalization": "LayerNorm"},
        names=in_layers(
            _LAYER,
            {
                "attention.q_norm": "self_attn.q_layernorm.norms.{part}",
                "attention.k_norm": "self_attn.k_layernorm.norms.{part}",
            },
        ),
    ),
    "phi3": LLAMA.variant(
        "Phi3ForCausalLM",
        PARTIAL_ROTARY,
        WINDOW,
        EMBEDDING_DROPOUT,
        keys=EPSILON | {"resid_pdrop": ("hidden_dropout_prob", 0.0)},
        names=_GATE_AND_UP | in_layers(_LAYER, {"attention.qkv": "self_attn.qkv_proj"}),
        has_parts_in_a_row=True,
    ),
    "smollm3": LLAMA.variant(
        "SmolLM3ForCausalLM",
        rotary(2e6),
        Feature(
            {"no_rope_layers", "no_rope_layer_interval"},
            _smollm3,
            lambda model: {"no_rope_layers": [int(model.rotates_in(i)) for i in range(model.num_layers)]},
        ),
        keys=ATTENTION_BIAS | TIED | MLP_BIAS,
        required=_NUM_KV_HEADS,
    ),
    "olmo2": _OLMO.variant("Olmo2ForCausalLM", ROTARY),
    "olmo3": _OLMO.variant(
        "Olmo3ForCausalLM", Feature(ROTARY.reads, write=hf_rope_by_kind), pattern(4, also=_olmo3)
    ),
    "ernie4_5": LLAMA.variant(
        "Ernie4_5ForCausalLM",
        rotary(5e5),
        keys=TIED | EPSILON | {"use_bias": ("add_qkv_bias add_out_proj_bias add_mlp_bias", False)},
        fixed={"rotary_interleaved": True},
        required=_SIZES_OF_HEADS,
    ),
    "seed_oss": LLAMA.variant(
        "SeedOssForCausalLM",
        ROTARY,
        keys=MLP_BIAS
        | {
            "attention_bias": ("add_qkv_bias", True),
            "attention_out_bias": ("add_out_proj_bias", False),
            "attention_dropout": ("attention_probs_dropout_prob", 0.1),
            "residual_dropout": ("hidden_dropout_prob", 0.1),
        },
        fixed={"embedding_dropout_prob": 0.0},
        required=_SIZES_OF_HEADS,
    ),
    "internlm2": LLAMA.variant(
        "InternLM2ForCausalLM",
        ROTARY,
        keys={"bias": ("add_qkv_bias add_out_proj_bias", False)},
        names={
            "embedding.word_embeddings": "model.tok_embeddings",
            **in_layers(
                _LAYER,
                {
                    "input_norm": "attention_norm",
                    "attention.qkv": "attention.wqkv",
                    "attention.out_proj": "attention.wo",
                    "mlp_norm": "ffn_norm",
                    "mlp.fc1": "feed_forward.{part}",
                    "mlp.fc2": "feed_forward.w2",
                },
            ),
            "head": "output",
        },
        part_names={"gate": "w1", "up": "w3"},
    ),
    "baichuan": LLAMA.variant(
        "BaichuanForCausalLM",
        Feature({*ROTARY.reads, "max_position_embeddings", "model_max_length"}, _baichuan, _write_baichuan),
        without=("max_position_embeddings",),
        names=in_layers(_LAYER, {"attention.qkv": "self_attn.W_pack"}),
        has_parts_in_a_row=True,
        off={"num_key_value_heads": ()},
    ),
}
