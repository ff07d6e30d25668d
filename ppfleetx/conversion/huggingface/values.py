"""Type and range of each key of a Hugging Face ``config.json`` that decides the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.fields import MAX_SIZE

_Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
_Count = Annotated[int, Field(ge=0, le=MAX_SIZE)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(ge=0, lt=1)]
_Part = Annotated[float, Field(gt=0, le=1)]

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"), _Size),
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), _Size),
    "max_position_embeddings": _Size,
    **dict.fromkeys(("n_inner", "num_key_value_heads", "head_dim"), _Size | None),
    "original_max_position_embeddings": _Size | None,
    **dict.fromkeys(("sliding_window", "max_window_layers"), _Count | None),
    **dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"), _Positive),
    "initializer_range": _NotNegative,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"), _Fraction),
    "hidden_dropout": _Fraction,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), bool | None),
    **dict.fromkeys(("use_parallel_residual", "use_sliding_window"), bool | None),
    "layer_types": list | None,
    **dict.fromkeys(
        ("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"), _Count | None
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"), _Count | None),
    **dict.fromkeys(("shared_expert_intermediate_size", "first_k_dense_replace"), _Count | None),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), _Count | None),
    "decoder_sparse_step": _Size | None,
    "mlp_only_layers": list[_Count] | None,
    "routed_scaling_factor": _Positive | None,
    **dict.fromkeys(("router_aux_loss_coef", "aux_loss_alpha"), _NotNegative | None),
    "router_jitter_noise": _Fraction | None,
    **dict.fromkeys(("norm_topk_prob", "output_router_logits", "seq_aux"), bool | None),
    **dict.fromkeys(("use_qk_norm", "qkv_bias"), bool | None),
    **dict.fromkeys(("activation_function", "hidden_act"), str | None),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), _Positive | None),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _Part | None),
}


_ROPE = ("rope_parameters", "rope_scaling")
_Config: type[BaseModel] = create_model(
    "_Config",
    __config__=ConfigDict(strict=True),
    **{key: (kind, None) for key, kind in (_TYPES | dict.fromkeys(_ROPE, dict | None)).items()},
)


def check_values(config: Mapping[str, Any]) -> None:
    """Check the values that decide the network, including those of rotary settings.

    Raises:
        CheckpointError: a value has the wrong type or is out of range; names key, value and rule.
    """
    _check(config, "")
    for key in _ROPE:
        _check(config.get(key) or {}, f"{key}.")


def _check(values: Mapping[str, Any], prefix: str) -> None:
    try:
        _Config.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        rule = first["msg"].replace("Input should be", "must be")
        raise CheckpointError(
            f"{prefix}{first['loc'][0]} = {shown(first['input'])} in config.json: {rule}"
        ) from error
