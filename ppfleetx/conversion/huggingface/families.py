"""The table of supported Hugging Face model types. To add a type, add a :class:`Family` here, in
``llama_families.py`` or in ``moe_families.py``."""

from __future__ import annotations

from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.family import (
    EMBEDDING_DROPOUT,
    GPT,
    KV_HEADS,
    LLAMA_NAMES,
    NEEDED,
    PARTIAL_ROTARY,
    ROTARY,
    SIZES,
    TIED,
    WINDOW,
    Config,
    Family,
    Feature,
    activation,
    in_layers,
    rotary_keys,
)
from ppfleetx.conversion.huggingface.llama_families import LLAMA_KIN
from ppfleetx.conversion.huggingface.moe_families import MIXTURES
from ppfleetx.conversion.huggingface.rope import hf_rope

_ROTARY = {"position_embedding_type": "rope", "normalization": "LayerNorm"}
_PARALLEL = {"parallel_residual": True, "shared_input_norm": True}
_UNTIED = {"add_head_bias": True, "tie_word_embeddings": False}
_EPSILON = {"layer_norm_eps": ("norm_epsilon", 1e-5)}
_WITH_NORMS_OF_MEGATRON = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.fc1": "mlp.dense_h_to_4h",
    "mlp.fc2": "mlp.dense_4h_to_h",
}


# ---- GPT-NeoX


def _write_neox_rope(model: ModelConfig) -> dict[str, Any]:
    keys = hf_rope(model)
    return {"rotary_emb_base": keys.pop("rope_theta"), "rotary_pct": model.rotary_percent, **keys}


_NEOX_ROTARY = Feature(
    {*ROTARY.reads, "rotary_pct", "rotary_emb_base"} - {"partial_rotary_factor", "rope_theta"},
    rotary_keys,
    _write_neox_rope,
)

# ---- GPT-J


def _gptj(config: Config) -> dict[str, Any]:
    head = config["n_embd"] // config["n_head"]
    turned = config.get("rotary_dim")
    if not isinstance(turned, int) or not 0 < turned <= head:
        raise CheckpointError(f"config.json: rotary_dim {shown(turned)} is not a part of a head of {head}")
    return {"rotary_percent": turned / head}


# ---- Falcon


def _falcon(config: Config) -> dict[str, Any]:
    is_new, heads = config.get("new_decoder_architecture", False), config["num_attention_heads"]
    groups = 1 if config.get("multi_query", True) else heads
    if is_new:
        groups = config.get("num_kv_heads", heads)
    is_parallel = config.get("parallel_attn", True)
    if is_new and not is_parallel:
        raise CheckpointError("config.json: new_decoder_architecture without parallel_attn is not supported")
    return {
        "num_query_groups": groups,
        "parallel_residual": is_parallel,
        "shared_input_norm": is_parallel and _norms_of_falcon(config) == 1,
    }


def _norms_of_falcon(config: Config) -> int:
    default = 2 if config.get("new_decoder_architecture", False) else 1
    return config.get("num_ln_in_parallel_attn") or default


def _names_of_falcon(config: Config) -> dict[str, str]:
    if _norms_of_falcon(config) == 1 or not config.get("parallel_attn", True):
        return {}
    return in_layers("transformer.h.{}", {"input_norm": "ln_attn", "mlp_norm": "ln_mlp"})


def _write_falcon(model: ModelConfig) -> dict[str, Any]:
    is_new = model.parallel_residual and (model.kv_heads > 1 or not model.shared_input_norm)
    return {
        "new_decoder_architecture": is_new,
        "num_kv_heads": model.kv_heads,
        "multi_query": model.kv_heads == 1 and not is_new,
        "parallel_attn": model.parallel_residual,
        "num_ln_in_parallel_attn": (1 if model.shared_input_norm else 2) if is_new else None,
        "alibi": False,
    }


_FALCON = Feature(
    {"new_decoder_architecture", "num_kv_heads", "multi_query", "parallel_attn", "num_ln_in_parallel_attn"},
    _falcon,
    _write_falcon,
)
_BLOOM_NAMES = {
    "embedding.word_embeddings": "transformer.word_embeddings",
    **in_layers(
        "transformer.h.{}",
        _WITH_NORMS_OF_MEGATRON
        | {"attention.qkv": "self_attention.query_key_value", "attention.out_proj": "self_attention.dense"},
    ),
    "decoder.final_norm": "transformer.ln_f",
    "head": "lm_head",
}

_GPT_KIN: dict[str, Family] = {
    "gpt2": GPT.variant(
        "GPT2LMHeadModel",
        activation("activation_function", "gelu_new"),
        EMBEDDING_DROPOUT,
        has_in_out_linears=True,
        has_parts_in_a_row=True,
        off={
            "scale_attn_by_inverse_layer_idx": (False,),
            "position_embedding_type": ("absolute", "learned"),
        },
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        SIZES
        | _EPSILON
        | {
            "hidden_dropout": ("hidden_dropout_prob", 0.0),
            "attention_bias": ("add_qkv_bias add_out_proj_bias", True),
            "use_parallel_residual": ("parallel_residual", True),
            "tie_word_embeddings": ("tie_word_embeddings", False),
        },
        _ROTARY | {"add_bias_linear": True, "add_mlp_bias": True},
        {
            "embedding.word_embeddings": "gpt_neox.embed_in",
            **in_layers(
                "gpt_neox.layers.{}",
                _WITH_NORMS_OF_MEGATRON
                | {"attention.qkv": "attention.query_key_value", "attention.out_proj": "attention.dense"},
            ),
            "decoder.final_norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        (activation("hidden_act", "gelu"), _NEOX_ROTARY),
    ),
    "gptj": GPT.variant(
        "GPTJForCausalLM",
        activation("activation_function", "gelu_new"),
        Feature({"rotary_dim"}, _gptj, lambda model: {"rotary_dim": model.rotary_size}),
        EMBEDDING_DROPOUT,
        without=("tie_word_embeddings",),
        keys={
            "resid_pdrop": ("hidden_dropout_prob", 0.0),
            "attn_pdrop": ("attention_probs_dropout_prob", 0.0),
        },
        fixed=_ROTARY
        | _PARALLEL
        | _UNTIED
        | {"add_qkv_bias": False, "add_out_proj_bias": False, "rotary_interleaved": True},
        names=in_layers(
            "transformer.h.{}",
            {
                "attention.qkv": "attn.{part}_proj",
                "attention.out_proj": "attn.out_proj",
                "mlp.fc1": "mlp.fc_in",
                "mlp.fc2": "mlp.fc_out",
            },
        ),
        off={"tie_word_embeddings": (False,)},
    ),
    "phi": Family(
        "PhiForCausalLM",
        SIZES | KV_HEADS | _EPSILON | {"resid_pdrop": ("hidden_dropout_prob", 0.0)},
        _ROTARY | _PARALLEL | _UNTIED | {"add_bias_linear": True},
        LLAMA_NAMES
        | in_layers(
            "model.layers.{}",
            {"attention.out_proj": "self_attn.dense", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"},
        )
        | {"decoder.final_norm": "model.final_layernorm"},
        (activation("hidden_act", "gelu_new"), EMBEDDING_DROPOUT, PARTIAL_ROTARY),
        off={"qk_layernorm": (False,), "tie_word_embeddings": (False,)},
    ),
    "gpt_bigcode": GPT.variant(
        "GPTBigCodeForCausalLM",
        activation("activation_function", "gelu_pytorch_tanh"),
        Feature(
            {"multi_query", "num_key_value_heads"},
            lambda config: {"num_query_groups": 1 if config.get("multi_query", True) else config["n_head"]},
            lambda model: {"multi_query": model.kv_heads == 1},
        ),
        EMBEDDING_DROPOUT,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        SIZES
        | TIED
        | {
            "num_key_value_heads": ("num_query_groups", NEEDED),
            "norm_epsilon": ("norm_epsilon", 1e-5),
            "use_bias": ("add_bias_linear", True),
            "residual_dropout": ("hidden_dropout_prob", 0.0),
            "embedding_dropout": ("embedding_dropout_prob", 0.0),
        },
        _ROTARY,
        LLAMA_NAMES | in_layers("model.layers.{}", {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}),
        (
            activation("hidden_act", "gelu_pytorch_tanh"),
            WINDOW,
            ROTARY,
            Feature(write=lambda model: {"embedding_dropout": model.embedding_dropout}),
        ),
        off={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
    ),
    "opt": Family(
        "OPTForCausalLM",
        {key: row for key, row in SIZES.items() if key not in ("intermediate_size", "initializer_range")}
        | TIED
        | {
            "ffn_dim": SIZES["intermediate_size"],
            "init_std": SIZES["initializer_range"],
            # Models with projected embeddings (OPT-350m) are post-norm models, which are refused anyway.
            "word_embed_proj_dim": ("hidden_size", lambda config: config["hidden_size"]),
            "max_position_embeddings": ("max_position_embeddings", 2048),
            "dropout": ("hidden_dropout_prob", 0.1),
        },
        GPT.fixed | {"position_offset": 2},
        {
            "embedding.word_embeddings": "model.decoder.embed_tokens",
            "embedding.position_embeddings": "model.decoder.embed_positions",
            **in_layers(
                "model.decoder.layers.{}",
                {
                    "input_norm": "self_attn_layer_norm",
                    "attention.qkv": "self_attn.{part}_proj",
                    "attention.out_proj": "self_attn.out_proj",
                    "mlp_norm": "final_layer_norm",
                    "mlp.fc1": "fc1",
                    "mlp.fc2": "fc2",
                },
            ),
            "decoder.final_norm": "model.decoder.final_layer_norm",
            "head": "lm_head",
        },
        (activation("activation_function", "relu"),),
        off={
            "do_layer_norm_before": (True,),
            "enable_bias": (True,),
            "layer_norm_elementwise_affine": (True,),
            "_remove_final_layer_norm": (False,),
            "layerdrop": (0, 0.0),
        },
    ),
    "bloom": Family(
        "BloomForCausalLM",
        {key: row for key, row in SIZES.items() if key in ("vocab_size", "hidden_size", "initializer_range")}
        | TIED
        | {
            "n_layer": ("num_layers", NEEDED),
            "n_head": ("num_attention_heads", NEEDED),
            "seq_length": ("max_position_embeddings", 2048),
            "layer_norm_epsilon": ("norm_epsilon", 1e-5),
            "hidden_dropout": ("hidden_dropout_prob", 0.0),
            "attention_dropout": ("attention_probs_dropout_prob", 0.0),
        },
        GPT.fixed | {"position_embedding_type": "alibi", "embedding_norm": True, "hidden_act": "gelu"},
        _BLOOM_NAMES | {"embedding.norm": "transformer.word_embeddings_layernorm"},
        aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
        off={"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,)},
    ),
    "falcon": Family(
        "FalconForCausalLM",
        {key: row for key, row in SIZES.items() if key != "intermediate_size"}
        | TIED
        | {
            "ffn_hidden_size": ("ffn_hidden_size", lambda config: 4 * config["hidden_size"]),
            "max_position_embeddings": ("max_position_embeddings", 2048),
            "layer_norm_epsilon": ("norm_epsilon", 1e-5),
            "hidden_dropout": ("hidden_dropout_prob", 0.0),
            "bias": ("add_bias_linear", False),
        },
        _ROTARY,
        _BLOOM_NAMES,
        (ROTARY, activation("activation", "gelu"), _FALCON),
        other_names=_names_of_falcon,
        aliases={"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
        off={"alibi": (False,)},
    ),
}
# A network is exported as the first model type that can express it. These types are tried first.
_FIRST = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "gpt_neox")
_DENSE = {name: (LLAMA_KIN | _GPT_KIN)[name] for name in (*_FIRST, *LLAMA_KIN, *_GPT_KIN)}
FAMILIES = _DENSE | MIXTURES
"""All families, by ``model_type``."""


def candidates(model: ModelConfig) -> dict[str, Family]:
    """Return {Hugging Face model type: family} to try for an export of ``model``, in order of preference.
    These are the mixture-of-experts types if ``model`` has experts, otherwise the dense types."""
    return _DENSE if model.moe is None else MIXTURES
