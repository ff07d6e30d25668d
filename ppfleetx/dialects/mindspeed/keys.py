"""The key table of MindSpeed-Core-MS: Megatron's under its own names, and what it has alone."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from ppfleetx.config.errors import shown_key
from ppfleetx.dialects.given import normal_name
from ppfleetx.dialects.keys import Key, KeyTable, fixed, joint, mapped, refused, unused
from ppfleetx.dialects.megatron.dialect import ALL_KEYS
from ppfleetx.dialects.mindspeed.names import ALIASES, plain
from ppfleetx.dialects.translate import choice, flag, number

LLM, PRECISION = "model_config.llm", "accelerate_config.precision"
_FLOAT32 = ("float32", "fp32")


def _betas(value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two numbers")
    return {f"Optimizer.beta{place}": number(beta) for place, beta in enumerate(value, start=1)}


def _norm(value: Any) -> str:
    kinds = {
        "RMSNorm": "RMSNorm",
        "FusedRMSNorm": "RMSNorm",
        "LayerNorm": "LayerNorm",
        "FusedLayerNorm": "LayerNorm",
    }
    return choice(kinds)(value)


OWN: tuple[Key, ...] = (
    mapped("optimizer_config.betas", "Optimizer.beta1 Optimizer.beta2", _betas, "both, in a list"),
    mapped("optimizer_config.clip_grad", "Optimizer.grad_clip.clip_norm"),
    mapped("model_config.normalization", "Model.normalization", _norm, "fused or not: RMSNorm or LayerNorm"),
    mapped("model_config.qkv_has_bias", "Model.add_qkv_bias", flag),
    mapped("model_config.mlp_has_bias", "Model.add_mlp_bias", flag),
    fixed(
        "training_config.loss_scale_factor",
        "the loss scale doubles and halves; for hysteresis "
        "(training_config.hysteresis) the guide's table names this key by mistake",
        (2, 2.0),
    ),
    joint(f"{PRECISION}.softmax_compute_dtype", "Model.softmax_in_fp32", "float32: true"),
    fixed(f"{PRECISION}.logits_compute_dtype", "the loss is computed in float32", _FLOAT32),
    fixed(f"{PRECISION}.grad_accumulation_dtype", "gradients are summed in float32", _FLOAT32),
    joint(
        f"{PRECISION}.residual-connection", (), "the type of compute_dtype, or float32 in a run in float32"
    ),
    joint(
        f"{PRECISION}.fused_operators",
        (),
        "flash_attention sets Model.use_flash_attn; others change speed alone",
    ),
    fixed(f"{PRECISION}.nofused_operators", "which operations share a kernel changes speed alone"),
    joint(f"{LLM}.tokenizer.divided_by", "Model.vocab_size_divisible_unit", "must divide padded_size"),
    unused(f"{LLM}.tokenizer.use_fast", "there is one tokenizer"),
    mapped(f"{LLM}.blocks.layernorm.norm_type", "Model.normalization", _norm),
    joint(f"{LLM}.blocks.attention.attention_type", "Model.num_query_groups", "MHA, MQA or GQA"),
    joint(f"{LLM}.blocks.attention.kv_group_size", "Model.num_query_groups", "of GQA: key/value heads"),
    mapped(f"{LLM}.blocks.attention.qkv_bias", "Model.add_qkv_bias", flag),
    mapped(f"{LLM}.blocks.ffn.mlp_bias", "Model.add_mlp_bias", flag),
    mapped(f"{LLM}.head.shared_embedding", "Model.tie_word_embeddings", flag),
    refused("model_config.moe_config.**", "mixtures of experts are not built"),
    refused("model_config.lora_config.**", "adapters are Model.lora of a configuration of this program"),
)


class _Names(KeyTable):
    """Keys under the names of MindSpeed-Core-MS, and under Megatron's where they stand alone."""

    def __init__(self) -> None:
        own = {key.name for key in OWN}
        super().__init__([*OWN, *ALL_KEYS.keys])
        self._names = [*own, *(name for name in ALIASES if name not in own)]
        self._own = own

    def find(self, name: str) -> Key | None:
        name = plain(name)
        if name in self._own:
            return super().find(name)
        if name in ALIASES:
            return super().find(ALIASES[name])
        return super().find(name) or (None if "." in name else super().find(normal_name(name)))

    def is_block(self, name: str) -> bool:
        prefix = f"{plain(name)}."
        in_train = name == "train_config" or plain(name) in ("training_config.ms_training_config",)
        return in_train or super().is_block(name) or any(one.startswith(prefix) for one in self._names)

    def nearest(self, name: str) -> str:
        name = plain(name)
        last = name.rpartition(".")[2]
        near = [one for one in self._names if one.rpartition(".")[2] == last]
        near += difflib.get_close_matches(name, self._names, n=2, cutoff=0.7)
        if near := list(dict.fromkeys(near))[:3]:
            return f"Did you mean {' or '.join(near)}?"
        return f"The page of this dialect lists all keys; {shown_key(name)} resembles none."


TABLE = _Names()


def documented() -> dict[str, KeyTable]:
    """The tables of the page: of each block, Megatron's keys under their names here, and the others."""
    groups: dict[str, list[Key]] = {}
    own = {key.name: key for key in OWN}
    for name in [*(name for name in ALIASES if name not in own), *own]:
        key = own.get(name) or replace(ALL_KEYS.find(ALIASES[name]), name=name)
        groups.setdefault(name.split(".")[0], []).append(key)
    return {name: KeyTable(keys) for name, keys in groups.items()}
