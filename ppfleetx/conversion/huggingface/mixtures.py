"""Hugging Face's mixtures of experts, with one row for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.family import (
    ATTENTION_BIAS,
    LLAMA_FIXED,
    LLAMA_KEYS,
    LLAMA_NAMES,
    LLAMA_READ,
    NEEDED,
    SILU,
    Config,
    Family,
    hf_window,
    llama_like,
    window_keys,
    write_llama,
)
from ppfleetx.conversion.huggingface.rope import hf_partial_rope, rope_keys

NEXT_TOKENS = "num_nextn_predict_layers"
"""The key for the number of layers after the last one that predict several tokens. They are not read."""

# ---- which layers are mixtures


def _all_layers_but(dense: Iterable[int], config: Config) -> dict[str, Any]:
    """``moe.layers``, or ``moe.first_dense_layers`` if only the first layers are dense."""
    layers, without = config["num_hidden_layers"], set(dense)
    mixtures = [layer for layer in range(layers) if layer not in without]
    if mixtures == list(range(layers - len(mixtures), layers)):
        return {"moe.first_dense_layers": layers - len(mixtures)}
    return {"moe.layers": mixtures}


def _dense_layers(model: ModelConfig) -> list[int]:
    assert model.moe is not None
    return sorted({*range(model.num_layers)} - {*model.moe.mixture_layers(model.num_layers)})


def _qwen_layers(config: Config) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    layers = range(config["num_hidden_layers"])
    return _all_layers_but([i for i in layers if i in dense or (i + 1) % step], config)


# ---- the balancing loss


def _pooled_loss(config: Config, weight: float) -> dict[str, Any]:
    """The balancing loss of transformers, which it only adds if ``output_router_logits`` is set."""
    if not config.get("output_router_logits", False):
        return {"moe.aux_loss.kind": "none"}
    return {"moe.aux_loss.kind": "pooled", "moe.aux_loss.weight": config.get("router_aux_loss_coef", weight)}


def _hf_pooled_loss(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    if model.moe.aux_loss.kind != "pooled":
        return {"output_router_logits": False}
    return {"output_router_logits": True, "router_aux_loss_coef": model.moe.aux_loss.weight}


_POOLED_READ = {"output_router_logits", "router_aux_loss_coef"}

# ---- what several of them share

_EXPERT_NAMES = {
    "decoder.layers.{}.mlp.router": "model.layers.{}.mlp.gate",
    "decoder.layers.{}.mlp.experts.fc1": "model.layers.{}.mlp.experts.{expert}.{part}_proj",
    "decoder.layers.{}.mlp.experts.fc2": "model.layers.{}.mlp.experts.{expert}.down_proj",
}
_SOFTMAX = {"moe.router.score": "softmax"}

# ---- Mixtral


def _mixtral(config: Config) -> dict[str, Any]:
    return {
        **llama_like({"rope_theta": 1e6, **config}),
        **window_keys(config, config.get("sliding_window")),
        **_pooled_loss(config, 0.001),
    }


def _write_mixtral(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    own = {"sliding_window": hf_window(model), "router_jitter_noise": model.moe.router.jitter}
    return {**write_llama(model), **own, **_hf_pooled_loss(model)}


_MIXTRAL = Family(
    "MixtralForCausalLM",
    LLAMA_KEYS
    | {
        "rms_norm_eps": ("norm_epsilon", 1e-5),
        "num_local_experts": ("moe.num_experts", NEEDED),
        "num_experts_per_tok": ("moe.top_k", 2),
        "router_jitter_noise": ("moe.router.jitter", 0.0),
    },
    LLAMA_FIXED | _SOFTMAX | {"moe.router.normalize": True},
    LLAMA_NAMES
    | {
        "decoder.layers.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate",
        "decoder.layers.{}.mlp.experts.fc1": "model.layers.{}.block_sparse_moe.experts.{expert}.{part}",
        "decoder.layers.{}.mlp.experts.fc2": "model.layers.{}.block_sparse_moe.experts.{expert}.w2",
    },
    _mixtral,
    _write_mixtral,
    LLAMA_READ | _POOLED_READ | {"sliding_window"},
    part_names={"gate": "w1", "up": "w3"},
    required=("num_key_value_heads",),
    off=SILU,
)

# ---- Qwen


def _qwen2_moe(config: Config) -> dict[str, Any]:
    return {**llama_like(config), **_qwen_layers(config), **_pooled_loss(config, 0.001)}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    return {**_qwen2_moe(config), **window_keys(config, window)}


def _write_qwen2_moe(model: ModelConfig) -> dict[str, Any]:
    made = {**write_llama(model), "decoder_sparse_step": 1, "mlp_only_layers": _dense_layers(model)}
    return made | {"use_sliding_window": False} | _hf_pooled_loss(model)


def _write_qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    window = hf_window(model)
    return _write_qwen2_moe(model) | {"use_sliding_window": window is not None, "sliding_window": window}


_EXPERT_KEYS = {
    "num_experts": ("moe.num_experts", NEEDED),
    "num_experts_per_tok": ("moe.top_k", NEEDED),
    "norm_topk_prob": ("moe.router.normalize", False),
}
_QWEN_KEYS = LLAMA_KEYS | _EXPERT_KEYS | {"moe_intermediate_size": ("moe.expert_ffn_size", NEEDED)}
_QWEN_READ = LLAMA_READ | _POOLED_READ | {"decoder_sparse_step", "mlp_only_layers"}

_QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    _QWEN_KEYS
    | {
        "qkv_bias": ("add_qkv_bias", True),
        "shared_expert_intermediate_size": ("moe.shared_experts.ffn_size", NEEDED),
    },
    LLAMA_FIXED | _SOFTMAX | {"moe.shared_experts.gate": True},
    LLAMA_NAMES
    | _EXPERT_NAMES
    | {
        "decoder.layers.{}.mlp.shared.fc1": "model.layers.{}.mlp.shared_expert.{part}_proj",
        "decoder.layers.{}.mlp.shared.fc2": "model.layers.{}.mlp.shared_expert.down_proj",
        "decoder.layers.{}.mlp.shared_gate": "model.layers.{}.mlp.shared_expert_gate",
    },
    _qwen2_moe,
    _write_qwen2_moe,
    _QWEN_READ | {"sliding_window"},  # only in effect with use_sliding_window, which is refused
    required=("num_key_value_heads",),
    off=SILU,
)

_QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    _QWEN_KEYS | ATTENTION_BIAS,
    LLAMA_FIXED | _SOFTMAX | {"qk_layernorm": True},
    LLAMA_NAMES | _EXPERT_NAMES,
    _qwen3_moe,
    _write_qwen3_moe,
    _QWEN_READ | {"use_sliding_window", "sliding_window"},
    required=("num_key_value_heads",),
    aliases={"num_local_experts": "num_experts"},
    off=SILU,
)

_OLMOE = Family(
    "OlmoeForCausalLM",
    LLAMA_KEYS | ATTENTION_BIAS | _EXPERT_KEYS | {"rms_norm_eps": ("norm_epsilon", 1e-5)},
    LLAMA_FIXED | _SOFTMAX | {"qk_layernorm": "all_heads"},
    LLAMA_NAMES | _EXPERT_NAMES,
    lambda config: llama_like(config) | _pooled_loss(config, 0.01),
    lambda model: write_llama(model) | _hf_pooled_loss(model),
    LLAMA_READ | _POOLED_READ,
    aliases={"num_local_experts": "num_experts"},
    off=SILU | {"clip_qkv": ()},
)

# ---- DeepSeek's routers: scores by group, shared experts, the first layers dense


def _deepseek_moe(config: Config) -> dict[str, Any]:
    groups, shared = config.get("n_group", 1), config.get("n_shared_experts", 1)
    made = {"moe.first_dense_layers": config.get("first_k_dense_replace", 1), "moe.shared_experts": None}
    if groups > 1:
        made |= {"moe.router.num_groups": groups, "moe.router.top_groups": config.get("topk_group", 1)}
    if shared:
        width = {"ffn_size": shared * config["moe_intermediate_size"], "gate": False}
        made["moe.shared_experts"] = width
    return made | _sequence_loss(config)


def _sequence_loss(config: Config) -> dict[str, Any]:
    """DeepSeek's own balancing loss, which transformers does not have."""
    weight = config.get("aux_loss_alpha", 0.0) if config.get("seq_aux", True) else 0.0
    return {"moe.aux_loss.kind": "sequence" if weight else "none", "moe.aux_loss.weight": weight}


def _write_deepseek_moe(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    moe, router = model.moe, model.moe.router
    shared = moe.shared_experts.ffn_size if moe.shared_experts else 0
    return {
        "first_k_dense_replace": len(_dense_layers(model)),
        "n_shared_experts": shared // (moe.expert_ffn_size or model.ffn_size),
        "n_group": router.num_groups or 1,
        "topk_group": router.top_groups or 1,
        NEXT_TOKENS: 0,
    }


_DEEPSEEK_MOE_KEYS = {
    "n_routed_experts": ("moe.num_experts", NEEDED),
    "num_experts_per_tok": ("moe.top_k", NEEDED),
    "moe_intermediate_size": ("moe.expert_ffn_size", NEEDED),
    "routed_scaling_factor": ("moe.router.scale", 1.0),
}
_DEEPSEEK_MOE_READ = {
    "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "aux_loss_alpha", "seq_aux",
    NEXT_TOKENS,
}  # fmt: skip
_DEEPSEEK_MOE_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": NEXT_TOKENS}
_DEEPSEEK_MOE_NAMES = _EXPERT_NAMES | {
    "decoder.layers.{}.mlp.router.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    "decoder.layers.{}.mlp.shared.fc1": "model.layers.{}.mlp.shared_experts.{part}_proj",
    "decoder.layers.{}.mlp.shared.fc2": "model.layers.{}.mlp.shared_experts.down_proj",
}
_DEEPSEEK_V3_ROUTER = {
    "moe.router.score": "sigmoid",
    "moe.router.bias": True,
    "moe.router.group_score": "top2",
}
_DEEPSEEK_V3_OFF = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}

_GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    LLAMA_KEYS
    | _DEEPSEEK_MOE_KEYS
    | {
        "rms_norm_eps": ("norm_epsilon", 1e-5),
        "attention_bias": ("add_qkv_bias", False),
        "use_qk_norm": ("qk_layernorm", False),
        "norm_topk_prob": ("moe.router.normalize", True),
    },
    LLAMA_FIXED | _DEEPSEEK_V3_ROUTER,
    LLAMA_NAMES | _DEEPSEEK_MOE_NAMES,
    lambda config: llama_like(config) | _deepseek_moe(config),
    lambda model: write_llama(model) | hf_partial_rope(model) | _write_deepseek_moe(model),
    LLAMA_READ | _DEEPSEEK_MOE_READ,
    required=("num_key_value_heads",),
    aliases=_DEEPSEEK_MOE_ALIASES,
    off=SILU | _DEEPSEEK_V3_OFF,
)

# ---- DeepSeek's latent attention

_LATENT_KEYS = {
    "kv_lora_rank": ("latent_attention.kv_rank", NEEDED),
    "q_lora_rank": ("latent_attention.q_rank", None),
    "qk_rope_head_dim": ("latent_attention.rope_head_dim", NEEDED),
    "qk_nope_head_dim": ("latent_attention.nope_head_dim", NEEDED),
    "v_head_dim": ("latent_attention.value_head_dim", NEEDED),
}
_LATENT_NAMES = {
    "decoder.layers.{}.attention.q_down": "model.layers.{}.self_attn.q_a_proj",
    "decoder.layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "decoder.layers.{}.attention.kv_down": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "decoder.layers.{}.attention.kv_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "decoder.layers.{}.attention.kv_up": "model.layers.{}.self_attn.kv_b_proj",
}
_WIDTHS_OF_HEADS = {"head_dim", "qk_head_dim"}
"""Keys that follow from the keys of latent attention."""


def _q_up(config: Config) -> dict[str, str]:
    theirs = "q_proj" if config.get("q_lora_rank") is None else "q_b_proj"
    return {"decoder.layers.{}.attention.q_up": f"model.layers.{{}}.self_attn.{theirs}"}


def _latent(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) != heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads {shown(config['num_key_value_heads'])} must be the number of "
            f"attention heads, {heads}: latent attention makes keys and values for each"
        )
    return rope_keys(config)


def _write_latent(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama(model),
        "num_key_value_heads": model.num_attention_heads,
        **_write_deepseek_moe(model),
    }


_DEEPSEEK_KEYS = {key: LLAMA_KEYS[key] for key in LLAMA_KEYS.keys() - {"head_dim", "num_key_value_heads"}}
_DEEPSEEK_READ = LLAMA_READ | _DEEPSEEK_MOE_READ | _WIDTHS_OF_HEADS | {"num_key_value_heads"}

_DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    _DEEPSEEK_KEYS
    | _LATENT_KEYS
    | _DEEPSEEK_MOE_KEYS
    | ATTENTION_BIAS
    | {
        "rope_interleave": ("rotary_interleaved", True),
        "routed_scaling_factor": ("moe.router.scale", 2.5),
        "norm_topk_prob": ("moe.router.normalize", True),
    },
    LLAMA_FIXED | _DEEPSEEK_V3_ROUTER,
    LLAMA_NAMES | _DEEPSEEK_MOE_NAMES | _LATENT_NAMES,
    lambda config: _latent(config) | _deepseek_moe({"first_k_dense_replace": 3, **config}),
    _write_latent,
    _DEEPSEEK_READ,
    other_names=_q_up,
    required=("q_lora_rank", "n_group", "topk_group"),
    aliases=_DEEPSEEK_MOE_ALIASES,
    off=SILU | _DEEPSEEK_V3_OFF | {"ep_size": (1,)},
)


def _deepseek_v2_moe(config: Config) -> dict[str, Any]:
    limited = config.get("topk_method", "greedy") == "group_limited_greedy"
    return _deepseek_moe({"first_k_dense_replace": 0, **config} | ({} if limited else {"n_group": 1}))


def _write_deepseek_v2(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    limited = model.moe.router.num_groups is not None
    return _write_latent(model) | {"topk_method": "group_limited_greedy" if limited else "greedy"}


_DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    _DEEPSEEK_KEYS | _LATENT_KEYS | _DEEPSEEK_MOE_KEYS | ATTENTION_BIAS,
    LLAMA_FIXED
    | {
        "rotary_interleaved": True,
        "moe.router.score": "softmax",
        "moe.router.normalize": False,
        "moe.router.group_score": "max",
    },
    LLAMA_NAMES | _DEEPSEEK_MOE_NAMES | _LATENT_NAMES,
    lambda config: _latent(config) | _deepseek_v2_moe(config),
    _write_deepseek_v2,
    _DEEPSEEK_READ | {"topk_method"},
    other_names=_q_up,
    required=("q_lora_rank", "n_shared_experts"),
    aliases=_DEEPSEEK_MOE_ALIASES | {"num_experts": "n_routed_experts"},
    off=SILU
    | {
        "norm_topk_prob": (False,), "scoring_func": ("softmax",), "moe_layer_freq": (1,), "ep_size": (1,),
        "mlp_bias": (False,),
    },
)  # fmt: skip

MIXTURES = {
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _QWEN3_MOE,
    "olmoe": _OLMOE,
    "glm4_moe": _GLM4_MOE,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v2": _DEEPSEEK_V2,
}
"""The mixtures by ``model_type``."""
