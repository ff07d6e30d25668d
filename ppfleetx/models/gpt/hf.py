"""Names and layouts of Hugging Face GPT-2 and Llama weights against ours, in both directions. NumPy only.

Ours: linears are ``[in, out]``; queries, keys and values are one matrix whose columns are grouped per
key/value head, ``[kv head][q ... q, k, v][head_dim]``; with SwiGLU gate and up are one matrix with
columns in pairs, ``[ffn][gate, up]``. GPT-2 stores linears as ``[in, out]`` with all q, then all k, then
all v; Llama stores every projection apart as ``[out, in]``.

Vocabulary: only true tokens are mapped. Padding rows are the reader's to add and are dropped on the way
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppfleetx.config.errors import CheckpointError

GetTensor = Callable[[str], np.ndarray]
NamedArrays = Iterator[tuple[str, np.ndarray]]

_GPT2_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}
_WORD = "embedding.word_embeddings.weight"
_POSITION = "embedding.position_embeddings.weight"


def model_keys(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of our ``Model`` section for a Hugging Face ``config.json``.

    Dropout is taken over for GPT-2 where it is one probability for all residual branches.

    Raises:
        CheckpointError: a model type or an option that our layers do not have.
    """
    return _family(hf_config).model_keys(hf_config)


def hf_to_canonical(hf_config: Mapping[str, Any], get_tensor: GetTensor) -> NamedArrays:
    """All parameters under our names.

    Args:
        hf_config: contents of ``config.json``.
        get_tensor: Hugging Face name to array; raises KeyError for a name it does not have.

    Raises:
        CheckpointError: a model type or an option that our layers do not have.
        KeyError: from ``get_tensor``.
    """
    model_keys(hf_config)
    yield from _family(hf_config).to_canonical(_Heads.of(hf_config), hf_config, get_tensor)


def canonical_to_hf(hf_config: Mapping[str, Any], get_tensor: GetTensor) -> NamedArrays:
    """All parameters under Hugging Face's names; the inverse of :func:`hf_to_canonical`."""
    model_keys(hf_config)
    yield from _family(hf_config).from_canonical(_Heads.of(hf_config), hf_config, get_tensor)


@dataclass(frozen=True)
class _Heads:
    """Sizes that the layout of the attention projections depends on."""

    hidden: int
    heads: int
    groups: int
    dim: int
    layers: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Heads:
        hidden = config.get("hidden_size") or config["n_embd"]
        heads = config.get("num_attention_heads") or config["n_head"]
        return cls(
            hidden,
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config.get("num_hidden_layers") or config["n_layer"],
            config["vocab_size"],
        )

    def fuse(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Columns ``[..., heads * dim]`` of q and ``[..., groups * dim]`` of k, v to our grouped order."""
        lead = q.shape[:-1]
        parts = [
            q.reshape(*lead, self.groups, -1, self.dim),
            k.reshape(*lead, self.groups, 1, self.dim),
            v.reshape(*lead, self.groups, 1, self.dim),
        ]
        return np.concatenate(parts, axis=-2).reshape(*lead, -1)

    def split(self, fused: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The inverse of :meth:`fuse`."""
        lead = fused.shape[:-1]
        grouped = fused.reshape(*lead, self.groups, -1, self.dim)
        q, k, v = grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]
        return q.reshape(*lead, -1), k.reshape(*lead, -1), v.reshape(*lead, -1)


class _GPT2:
    """``model_type: gpt2``. Names may or may not start with ``transformer.``."""

    # Ours to theirs; these need no change of layout.
    COPIED = (
        ("input_norm.weight", "ln_1.weight"),
        ("input_norm.bias", "ln_1.bias"),
        ("attention.out_proj.weight", "attn.c_proj.weight"),
        ("attention.out_proj.bias", "attn.c_proj.bias"),
        ("mlp_norm.weight", "ln_2.weight"),
        ("mlp_norm.bias", "ln_2.bias"),
        ("mlp.fc1.weight", "mlp.c_fc.weight"),
        ("mlp.fc1.bias", "mlp.c_fc.bias"),
        ("mlp.fc2.weight", "mlp.c_proj.weight"),
        ("mlp.fc2.bias", "mlp.c_proj.bias"),
    )

    @staticmethod
    def model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
        _refuse(config, "scale_attn_by_inverse_layer_idx", {False, None})
        _refuse(config, "scale_attn_weights", {True, None})
        _refuse(config, "tie_word_embeddings", {True, None})
        activation = config.get("activation_function", "gelu_new")
        if activation not in _GPT2_ACTIVATIONS:
            raise CheckpointError(f"activation_function {activation!r} of this GPT-2 is not supported")
        return {
            "vocab_size": config["vocab_size"],
            "hidden_size": config["n_embd"],
            "num_layers": config["n_layer"],
            "num_attention_heads": config["n_head"],
            "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
            "max_position_embeddings": config["n_positions"],
            "hidden_act": _GPT2_ACTIVATIONS[activation],
            "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
            "initializer_range": config.get("initializer_range", 0.02),
            "hidden_dropout_prob": config.get("resid_pdrop", 0.1),
            "attention_probs_dropout_prob": config.get("attn_pdrop", 0.1),
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "tie_word_embeddings": True,
            "add_bias_linear": True,
        }

    @classmethod
    def to_canonical(cls, heads: _Heads, config: Mapping[str, Any], get_tensor: GetTensor) -> NamedArrays:
        def get(name: str) -> np.ndarray:
            try:
                return get_tensor(f"transformer.{name}")
            except KeyError:
                return get_tensor(name)

        yield _WORD, get("wte.weight")
        yield _POSITION, get("wpe.weight")
        for index in range(heads.layers):
            ours, theirs = f"decoder.layers.{index}", f"h.{index}"
            for kind in ("weight", "bias"):
                fused = get(f"{theirs}.attn.c_attn.{kind}")
                yield f"{ours}.attention.qkv.{kind}", heads.fuse(*np.split(fused, 3, axis=-1))
            for our_name, their_name in cls.COPIED:
                yield f"{ours}.{our_name}", get(f"{theirs}.{their_name}")
        yield "decoder.final_norm.weight", get("ln_f.weight")
        yield "decoder.final_norm.bias", get("ln_f.bias")

    @classmethod
    def from_canonical(cls, heads: _Heads, config: Mapping[str, Any], get_tensor: GetTensor) -> NamedArrays:
        yield "transformer.wte.weight", get_tensor(_WORD)[: heads.vocab]
        yield "transformer.wpe.weight", get_tensor(_POSITION)
        for index in range(heads.layers):
            ours, theirs = f"decoder.layers.{index}", f"transformer.h.{index}"
            for kind in ("weight", "bias"):
                parts = heads.split(get_tensor(f"{ours}.attention.qkv.{kind}"))
                yield f"{theirs}.attn.c_attn.{kind}", np.concatenate(parts, axis=-1)
            for our_name, their_name in cls.COPIED:
                yield f"{theirs}.{their_name}", get_tensor(f"{ours}.{our_name}")
        yield "transformer.ln_f.weight", get_tensor("decoder.final_norm.weight")
        yield "transformer.ln_f.bias", get_tensor("decoder.final_norm.bias")


class _Llama:
    """``model_type: llama``."""

    @staticmethod
    def model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
        _refuse(config, "hidden_act", {"silu", "swish", None})
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise CheckpointError(f"rope scaling {rope_type!r} of this Llama is not supported")
        heads = _Heads.of(config)
        return {
            "vocab_size": heads.vocab,
            "hidden_size": heads.hidden,
            "num_layers": heads.layers,
            "num_attention_heads": heads.heads,
            "num_query_groups": heads.groups,
            "head_dim": heads.dim,
            "ffn_hidden_size": config["intermediate_size"],
            "max_position_embeddings": config["max_position_embeddings"],
            "hidden_act": "swiglu",
            "norm_epsilon": config.get("rms_norm_eps", 1e-6),
            "initializer_range": config.get("initializer_range", 0.02),
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": config.get("attention_dropout", 0.0),
            "position_embedding_type": "rope",
            "rotary_base": rope.get("rope_theta") or config.get("rope_theta", 10000.0),
            "normalization": "RMSNorm",
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "add_bias_linear": False,
            "add_qkv_bias": bool(config.get("attention_bias", False)),
            "add_out_proj_bias": bool(config.get("attention_bias", False)),
            "add_mlp_bias": bool(config.get("mlp_bias", False)),
        }

    @classmethod
    def to_canonical(cls, heads: _Heads, config: Mapping[str, Any], get_tensor: GetTensor) -> NamedArrays:
        keys = cls.model_keys(config)
        yield _WORD, get_tensor("model.embed_tokens.weight")
        for index in range(heads.layers):
            ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
            yield f"{ours}.input_norm.weight", get_tensor(f"{theirs}.input_layernorm.weight")
            yield f"{ours}.mlp_norm.weight", get_tensor(f"{theirs}.post_attention_layernorm.weight")
            for kind in _kinds(keys["add_qkv_bias"]):
                parts = (get_tensor(f"{theirs}.self_attn.{part}_proj.{kind}").T for part in "qkv")
                yield f"{ours}.attention.qkv.{kind}", heads.fuse(*parts)
            for kind in _kinds(keys["add_out_proj_bias"]):
                yield f"{ours}.attention.out_proj.{kind}", get_tensor(f"{theirs}.self_attn.o_proj.{kind}").T
            for kind in _kinds(keys["add_mlp_bias"]):
                gate_up = [get_tensor(f"{theirs}.mlp.{part}_proj.{kind}").T for part in ("gate", "up")]
                paired = np.stack(gate_up, axis=-1)
                yield f"{ours}.mlp.fc1.{kind}", paired.reshape(*paired.shape[:-2], -1)
                yield f"{ours}.mlp.fc2.{kind}", get_tensor(f"{theirs}.mlp.down_proj.{kind}").T
        yield "decoder.final_norm.weight", get_tensor("model.norm.weight")
        if not keys["tie_word_embeddings"]:
            yield "head.weight", get_tensor("lm_head.weight").T

    @classmethod
    def from_canonical(cls, heads: _Heads, config: Mapping[str, Any], get_tensor: GetTensor) -> NamedArrays:
        keys = cls.model_keys(config)
        yield "model.embed_tokens.weight", get_tensor(_WORD)[: heads.vocab]
        for index in range(heads.layers):
            ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
            yield f"{theirs}.input_layernorm.weight", get_tensor(f"{ours}.input_norm.weight")
            yield f"{theirs}.post_attention_layernorm.weight", get_tensor(f"{ours}.mlp_norm.weight")
            for kind in _kinds(keys["add_qkv_bias"]):
                parts = heads.split(get_tensor(f"{ours}.attention.qkv.{kind}"))
                for part, array in zip("qkv", parts, strict=True):
                    yield f"{theirs}.self_attn.{part}_proj.{kind}", array.T
            for kind in _kinds(keys["add_out_proj_bias"]):
                yield f"{theirs}.self_attn.o_proj.{kind}", get_tensor(f"{ours}.attention.out_proj.{kind}").T
            for kind in _kinds(keys["add_mlp_bias"]):
                fc1 = get_tensor(f"{ours}.mlp.fc1.{kind}")
                yield f"{theirs}.mlp.gate_proj.{kind}", fc1[..., 0::2].T
                yield f"{theirs}.mlp.up_proj.{kind}", fc1[..., 1::2].T
                yield f"{theirs}.mlp.down_proj.{kind}", get_tensor(f"{ours}.mlp.fc2.{kind}").T
        yield "model.norm.weight", get_tensor("decoder.final_norm.weight")
        if not keys["tie_word_embeddings"]:
            yield "lm_head.weight", get_tensor("head.weight")[:, : heads.vocab].T


_FAMILIES: dict[str, type[_GPT2] | type[_Llama]] = {"gpt2": _GPT2, "llama": _Llama}


def _family(config: Mapping[str, Any]) -> type[_GPT2] | type[_Llama]:
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported; those that are: {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[model_type]


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)


def _refuse(config: Mapping[str, Any], key: str, supported: set[Any]) -> None:
    if config.get(key) not in supported:
        raise CheckpointError(f"{key}: {config[key]!r} of this {config['model_type']} is not supported")
