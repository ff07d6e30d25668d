"""Names and layouts of Hugging Face's weights against ours, in both directions. NumPy only.

Ours: linears are ``[in, out]``; queries, keys and values are one matrix whose columns are grouped per
key/value head, ``[kv head][q ... q, k, v][head_dim]``; with SwiGLU gate and up are one matrix with
columns in pairs, ``[ffn][gate, up]``. GPT-2 stores linears as ``[in, out]`` with all q, then all k, then
all v; Llama, Mistral and Qwen store every projection apart as ``[out, in]``; GPT-NeoX stores ``[out, in]``
with the q, k and v of a head side by side, as ours are.

Vocabulary: only true tokens are mapped. Padding rows are the reader's to add and are dropped on the way
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppfleetx.conversion.huggingface.config_keys import model_keys

_WORD = "embedding.word_embeddings.weight"
_POSITION = "embedding.position_embeddings.weight"
GPT2_PREFIX = "transformer."


@dataclass(frozen=True)
class Rule:
    """One parameter of ours and the tensors of Hugging Face's that make it up.

    Attributes:
        ours: canonical name.
        theirs: Hugging Face's names, in the order of ``join``'s arguments.
        join: their arrays to ours. Moves elements, never computes with them.
        split: the inverse; drops vocabulary padding.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Callable[..., np.ndarray]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]


def rules(hf_config: Mapping[str, Any]) -> list[Rule]:
    """One rule for every parameter, in model order; GPT-2's names with ``transformer.`` before them.

    Raises:
        CheckpointError: as :func:`model_keys`.
    """
    keys = model_keys(hf_config)
    return list(_RULES[hf_config["model_type"]](_Heads.of(keys), keys))


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
    def of(cls, keys: Mapping[str, Any]) -> _Heads:
        """From keys of our ``Model`` section."""
        hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
        groups, dim = keys.get("num_query_groups", heads), keys.get("head_dim", hidden // heads)
        return cls(hidden, heads, groups, dim, keys["num_layers"], keys["vocab_size"])

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


def _copied(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,), lambda array: array, lambda array: (array,))


def _transposed(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,), lambda array: array.T, lambda array: (array.T,))


def _vocabulary_rows(theirs: str, vocab: int) -> Rule:
    return Rule(_WORD, (theirs,), lambda array: array, lambda array: (array[:vocab],))


def _linear(ours: str, theirs: str, has_bias: bool = True) -> Iterator[Rule]:
    """A matrix that is stored as ``[out, in]``, and its bias."""
    for kind in _kinds(has_bias):
        yield _transposed(f"{ours}.{kind}", f"{theirs}.{kind}")


def _vocabulary_columns(theirs: str, vocab: int) -> Rule:
    return Rule("head.weight", (theirs,), lambda array: array.T, lambda array: (array[:, :vocab].T,))


# ---- GPT-2

# Ours to theirs; these need no change of layout.
_GPT2_COPIED = (
    ("input_norm", "ln_1"),
    ("attention.out_proj", "attn.c_proj"),
    ("mlp_norm", "ln_2"),
    ("mlp.fc1", "mlp.c_fc"),
    ("mlp.fc2", "mlp.c_proj"),
)


def _gpt2_rules(heads: _Heads, keys: Mapping[str, Any]) -> Iterator[Rule]:
    yield _vocabulary_rows("transformer.wte.weight", heads.vocab)
    yield _copied(_POSITION, "transformer.wpe.weight")
    for index in range(heads.layers):
        ours, theirs = f"decoder.layers.{index}", f"transformer.h.{index}"
        for kind in ("weight", "bias"):
            yield Rule(
                f"{ours}.attention.qkv.{kind}",
                (f"{theirs}.attn.c_attn.{kind}",),
                lambda fused: heads.fuse(*np.split(fused, 3, axis=-1)),
                lambda fused: (np.concatenate(heads.split(fused), axis=-1),),
            )
            for our_name, their_name in _GPT2_COPIED:
                yield _copied(f"{ours}.{our_name}.{kind}", f"{theirs}.{their_name}.{kind}")
    for kind in ("weight", "bias"):
        yield _copied(f"decoder.final_norm.{kind}", f"transformer.ln_f.{kind}")
    if not keys["tie_word_embeddings"]:
        yield _vocabulary_columns("lm_head.weight", heads.vocab)


# ---- Llama


def _llama_rules(heads: _Heads, keys: Mapping[str, Any]) -> Iterator[Rule]:
    yield _vocabulary_rows("model.embed_tokens.weight", heads.vocab)
    for index in range(heads.layers):
        ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
        yield _copied(f"{ours}.input_norm.weight", f"{theirs}.input_layernorm.weight")
        for kind in _kinds(keys["add_qkv_bias"]):
            yield Rule(
                f"{ours}.attention.qkv.{kind}",
                tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv"),
                lambda *parts: heads.fuse(*(part.T for part in parts)),
                lambda fused: tuple(part.T for part in heads.split(fused)),
            )
        for norm in ("q_norm", "k_norm") if keys.get("qk_layernorm") else ():
            yield _copied(f"{ours}.attention.{norm}.weight", f"{theirs}.self_attn.{norm}.weight")
        yield from _linear(
            f"{ours}.attention.out_proj", f"{theirs}.self_attn.o_proj", keys["add_out_proj_bias"]
        )
        yield _copied(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        for kind in _kinds(keys["add_mlp_bias"]):
            yield Rule(
                f"{ours}.mlp.fc1.{kind}",
                tuple(f"{theirs}.mlp.{part}_proj.{kind}" for part in ("gate", "up")),
                lambda gate, up: pair_columns(gate.T, up.T),
                lambda fc1: (fc1[..., 0::2].T, fc1[..., 1::2].T),
            )
            yield _transposed(f"{ours}.mlp.fc2.{kind}", f"{theirs}.mlp.down_proj.{kind}")
    yield _copied("decoder.final_norm.weight", "model.norm.weight")
    if not keys["tie_word_embeddings"]:
        yield _vocabulary_columns("lm_head.weight", heads.vocab)


def pair_columns(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Columns of two matrices (or elements of two vectors) in turns: gate, up, gate, up, ..."""
    paired = np.stack([gate, up], axis=-1)
    return paired.reshape(*paired.shape[:-2], -1)


# ---- GPT-NeoX

_NEOX_LINEARS = (
    ("attention.qkv", "attention.query_key_value", "add_qkv_bias"),
    ("attention.out_proj", "attention.dense", "add_out_proj_bias"),
    ("mlp.fc1", "mlp.dense_h_to_4h", "add_mlp_bias"),
    ("mlp.fc2", "mlp.dense_4h_to_h", "add_mlp_bias"),
)


def _neox_rules(heads: _Heads, keys: Mapping[str, Any]) -> Iterator[Rule]:
    yield _vocabulary_rows("gpt_neox.embed_in.weight", heads.vocab)
    for index in range(heads.layers):
        ours, theirs = f"decoder.layers.{index}", f"gpt_neox.layers.{index}"
        for our_name, their_name in (
            ("input_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
        ):
            for kind in ("weight", "bias"):
                yield _copied(f"{ours}.{our_name}.{kind}", f"{theirs}.{their_name}.{kind}")
        for our_name, their_name, bias in _NEOX_LINEARS:
            yield from _linear(f"{ours}.{our_name}", f"{theirs}.{their_name}", keys[bias])
    for kind in ("weight", "bias"):
        yield _copied(f"decoder.final_norm.{kind}", f"gpt_neox.final_layer_norm.{kind}")
    if not keys["tie_word_embeddings"]:
        yield _vocabulary_columns("embed_out.weight", heads.vocab)


_RULES: dict[str, Callable[..., Iterator[Rule]]] = {
    "gpt2": _gpt2_rules,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama_rules),
    "gpt_neox": _neox_rules,
}


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)
