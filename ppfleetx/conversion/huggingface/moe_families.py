"""The model types with mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.family import (
    ATTENTION_BIAS,
    EPSILON,
    LLAMA,
    NEEDED,
    PARTIAL_ROTARY,
    ROTARY,
    WINDOW,
    Config,
    Family,
    Feature,
    hf_window,
    in_layers,
    rotary,
    window_keys,
)
from ppfleetx.conversion.huggingface.rope import hf_rope, rope_keys

NEXT_TOKENS = "num_nextn_predict_layers"
"""The ``config.json`` key for the number of multi-token prediction layers, whose weights are not read."""

# ---- which layers are mixtures


def _all_layers_but(dense: Iterable[int], config: Config) -> dict[str, Any]:
    """Return the setting of our ``Model`` section that says which layers have experts, as {key: value}. The
    key is ``moe.first_dense_layers`` if only leading layers are dense, otherwise ``moe.layers``.

    Args:
        dense: the numbers of the layers without experts.
    """
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


_QWEN_LAYERS = Feature(
    {"decoder_sparse_step", "mlp_only_layers"},
    _qwen_layers,
    lambda model: {"decoder_sparse_step": 1, "mlp_only_layers": _dense_layers(model)},
)


def _balancing_loss(weight: float) -> Feature:
    """Make a :class:`Feature` for transformers' load-balancing loss, which ``output_router_logits`` turns on.
    ``weight`` is the default weight of this loss."""
    switch, key = "output_router_logits", "router_aux_loss_coef"

    def read(config: Config) -> dict[str, Any]:
        if not config.get(switch, False):
            return {"moe.aux_loss.kind": "none"}
        return {"moe.aux_loss.kind": "pooled", "moe.aux_loss.weight": config.get(key, weight)}

    def write(model: ModelConfig) -> dict[str, Any]:
        assert model.moe is not None
        if model.moe.aux_loss.kind != "pooled":
            return {switch: False}
        return {switch: True, key: model.moe.aux_loss.weight}

    return Feature({switch, key}, read, write)


# ---- Mixtral, Qwen, OLMoE: softmax over all experts

_LAYER = "model.layers.{}"
_ALIAS = {"num_local_experts": "num_experts"}
_MIXTURE = LLAMA.variant(
    "",
    fixed={"moe.router.score": "softmax"},
    names=in_layers(
        _LAYER,
        {
            "mlp.router": "mlp.gate",
            "mlp.experts.fc1": "mlp.experts.{expert}.{part}_proj",
            "mlp.experts.fc2": "mlp.experts.{expert}.down_proj",
        },
    ),
    required=("num_key_value_heads",),
)
_EXPERT_KEYS = {
    "num_experts": ("moe.num_experts", NEEDED),
    "num_experts_per_tok": ("moe.top_k", NEEDED),
    "norm_topk_prob": ("moe.router.normalize", False),
}
_QWEN = _MIXTURE.variant(
    "",
    ROTARY,
    _QWEN_LAYERS,
    _balancing_loss(0.001),
    keys=_EXPERT_KEYS | {"moe_intermediate_size": ("moe.expert_ffn_size", NEEDED)},
)


def _qwen3_window(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    return window_keys(config, window)


def _write_qwen3_window(model: ModelConfig) -> dict[str, Any]:
    window = hf_window(model)
    return {"use_sliding_window": window is not None, "sliding_window": window}


_SOFTMAX: dict[str, Family] = {
    "mixtral": _MIXTURE.variant(
        "MixtralForCausalLM",
        rotary(1e6),
        WINDOW,
        _balancing_loss(0.001),
        keys=EPSILON
        | {
            "num_local_experts": ("moe.num_experts", NEEDED),
            "num_experts_per_tok": ("moe.top_k", 2),
            "router_jitter_noise": ("moe.router.jitter", 0.0),
        },
        fixed={"moe.router.normalize": True},
        names=in_layers(
            _LAYER,
            {
                "mlp.router": "block_sparse_moe.gate",
                "mlp.experts.fc1": "block_sparse_moe.experts.{expert}.{part}",
                "mlp.experts.fc2": "block_sparse_moe.experts.{expert}.w2",
            },
        ),
        part_names={"gate": "w1", "up": "w3"},
    ),
    "qwen2_moe": _QWEN.variant(
        "Qwen2MoeForCausalLM",
        # A window needs use_sliding_window, which is refused.
        Feature({"sliding_window"}, write=lambda _: {"use_sliding_window": False}),
        keys={
            "qkv_bias": ("add_qkv_bias", True),
            "shared_expert_intermediate_size": ("moe.shared_experts.ffn_size", NEEDED),
        },
        fixed={"moe.shared_experts.gate": True},
        names=in_layers(
            _LAYER,
            {
                "mlp.shared.fc1": "mlp.shared_expert.{part}_proj",
                "mlp.shared.fc2": "mlp.shared_expert.down_proj",
                "mlp.shared_gate": "mlp.shared_expert_gate",
            },
        ),
    ),
    "qwen3_moe": _QWEN.variant(
        "Qwen3MoeForCausalLM",
        Feature({"use_sliding_window", "sliding_window"}, _qwen3_window, _write_qwen3_window),
        keys=ATTENTION_BIAS,
        fixed={"qk_layernorm": True},
        aliases=_ALIAS,
    ),
    "olmoe": _MIXTURE.variant(
        "OlmoeForCausalLM",
        ROTARY,
        _balancing_loss(0.01),
        keys=ATTENTION_BIAS | _EXPERT_KEYS | EPSILON,
        fixed={"qk_layernorm": "all_heads"},
        aliases=_ALIAS,
        required=(),
        off={"clip_qkv": ()},
    ),
}

# ---- DeepSeek: group-limited routing, shared experts, dense first layers


def _deepseek_moe(config: Config, first_dense: int) -> dict[str, Any]:
    groups, shared = config.get("n_group", 1), config.get("n_shared_experts", 1)
    dense = config.get("first_k_dense_replace", first_dense)
    made = {"moe.first_dense_layers": dense, "moe.shared_experts": None}
    if groups > 1:
        made |= {"moe.router.num_groups": groups, "moe.router.top_groups": config.get("topk_group", 1)}
    if shared:
        width = {"ffn_size": shared * config["moe_intermediate_size"], "gate": False}
        made["moe.shared_experts"] = width
    # DeepSeek's own balancing loss, which transformers does not implement.
    weight = config.get("aux_loss_alpha", 0.0) if config.get("seq_aux", True) else 0.0
    return made | {"moe.aux_loss.kind": "sequence" if weight else "none", "moe.aux_loss.weight": weight}


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


def _experts_of_deepseek(
    first_dense: int, read: Callable[[Config], Config] = lambda config: config
) -> Feature:
    """Make a :class:`Feature` that converts the expert keys of DeepSeek's model types.

    Args:
        first_dense: the default number of leading layers without experts.
        read: a function that is applied to the ``config.json`` before the conversion.
    """
    return Feature(
        {
            "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "aux_loss_alpha", "seq_aux",
            NEXT_TOKENS,
        },
        lambda config: _deepseek_moe(read(config), first_dense),
        _write_deepseek_moe,
    )  # fmt: skip


_DEEPSEEK = _MIXTURE.variant(
    "",
    keys={
        "n_routed_experts": ("moe.num_experts", NEEDED),
        "num_experts_per_tok": ("moe.top_k", NEEDED),
        "moe_intermediate_size": ("moe.expert_ffn_size", NEEDED),
        "routed_scaling_factor": ("moe.router.scale", 1.0),
    },
    names=in_layers(
        _LAYER,
        {
            "mlp.router.bias": "mlp.gate.e_score_correction_bias",
            "mlp.shared.fc1": "mlp.shared_experts.{part}_proj",
            "mlp.shared.fc2": "mlp.shared_experts.down_proj",
        },
    ),
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": NEXT_TOKENS},
    off={"moe_layer_freq": (1,)},
)
_SIGMOID = {"moe.router.score": "sigmoid", "moe.router.bias": True, "moe.router.group_score": "top2"}
_SIGMOID_OFF = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}

# ---- DeepSeek's multi-head latent attention


def _q_up(config: Config) -> dict[str, str]:
    theirs = "q_proj" if config.get("q_lora_rank") is None else "q_b_proj"
    return in_layers(_LAYER, {"attention.q_up": f"self_attn.{theirs}"})


def _latent(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) != heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads {shown(config['num_key_value_heads'])} must be the number of "
            f"attention heads, {heads}: latent attention makes keys and values for each"
        )
    return rope_keys(config)


_LATENT = _DEEPSEEK.variant(
    "",
    # Head sizes follow from the keys of latent attention.
    Feature(
        {*ROTARY.reads, "head_dim", "qk_head_dim", "num_key_value_heads"},
        _latent,
        lambda model: {**hf_rope(model), "num_key_value_heads": model.num_attention_heads},
    ),
    without=("head_dim", "num_key_value_heads"),
    keys=ATTENTION_BIAS
    | {
        "kv_lora_rank": ("latent_attention.kv_rank", NEEDED),
        "q_lora_rank": ("latent_attention.q_rank", None),
        "qk_rope_head_dim": ("latent_attention.rope_head_dim", NEEDED),
        "qk_nope_head_dim": ("latent_attention.nope_head_dim", NEEDED),
        "v_head_dim": ("latent_attention.value_head_dim", NEEDED),
    },
    names=in_layers(
        _LAYER,
        {
            "attention.q_down": "self_attn.q_a_proj",
            "attention.q_norm": "self_attn.q_a_layernorm",
            "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
            "attention.kv_norm": "self_attn.kv_a_layernorm",
            "attention.kv_up": "self_attn.kv_b_proj",
        },
    ),
    other_names=_q_up,
    off={"ep_size": (1,)},
)
_LIMITED = "group_limited_greedy"


def _without_unused_groups(config: Config) -> Config:
    return config if config.get("topk_method", "greedy") == _LIMITED else {**config, "n_group": 1}


def _write_topk_method(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    return {"topk_method": "greedy" if model.moe.router.num_groups is None else _LIMITED}


MIXTURES: dict[str, Family] = _SOFTMAX | {
    "glm4_moe": _DEEPSEEK.variant(
        "Glm4MoeForCausalLM",
        PARTIAL_ROTARY,
        _experts_of_deepseek(1),
        keys=EPSILON
        | {
            "attention_bias": ("add_qkv_bias", False),
            "use_qk_norm": ("qk_layernorm", False),
            "norm_topk_prob": ("moe.router.normalize", True),
        },
        fixed=_SIGMOID,
        off=_SIGMOID_OFF,
    ),
    "deepseek_v3": _LATENT.variant(
        "DeepseekV3ForCausalLM",
        _experts_of_deepseek(3),
        keys={
            "rope_interleave": ("rotary_interleaved", True),
            "routed_scaling_factor": ("moe.router.scale", 2.5),
            "norm_topk_prob": ("moe.router.normalize", True),
        },
        fixed=_SIGMOID,
        required=("q_lora_rank", "n_group", "topk_group"),
        off=_SIGMOID_OFF,
    ),
    "deepseek_v2": _LATENT.variant(
        "DeepseekV2ForCausalLM",
        _experts_of_deepseek(0, _without_unused_groups),
        Feature({"topk_method"}, write=_write_topk_method),
        fixed={"rotary_interleaved": True, "moe.router.normalize": False, "moe.router.group_score": "max"},
        required=("q_lora_rank", "n_shared_experts"),
        aliases={"num_experts": "n_routed_experts"},
        off={"norm_topk_prob": (False,), "scoring_func": ("softmax",), "mlp_bias": (False,)},
    ),
}
"""The mixture-of-experts families, by ``model_type``."""
