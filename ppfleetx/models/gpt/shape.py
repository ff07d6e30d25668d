"""Parameters and floating-point operations of a GPT, by arithmetic alone.

Letters: B global batch, s sequence length, h hidden size, f MLP width, L layers, V padded vocabulary,
q width of all query heads, kv width of all key (or value) heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ppfleetx.config.registries import ARCHITECTURES, NORMS
from ppfleetx.config.registry import load_target
from ppfleetx.config.sections.model import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> global shape of every parameter, in model order. Linear weights are [in, out].

    A classification head has `num_classes` outputs, which a loaded configuration knows.
    """
    h, vocab = model.hidden_size, model.padded_vocab_size
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (vocab, h)}
    if model.positions.has_table:
        shapes["embedding.position_embeddings.weight"] = (model.max_position_embeddings, h)
    layer = layer_parameter_shapes(model)
    for index in range(model.num_layers):
        for name, shape in layer.items():
            shapes[f"decoder.layers.{index}.{name}"] = shape
            shapes |= dict(_adapter(f"decoder.layers.{index}.{name}", shape, model))
    shapes |= dict(_norm("decoder.final_norm", model))
    if model.task.classifies:
        shapes["score.weight"] = (h, model.num_classes or 0)
    elif not model.tie_word_embeddings:
        shapes["head.weight"] = (h, vocab)
        if model.has_head_bias:
            shapes["head.bias"] = (vocab,)
    return shapes


def layer_parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Parameters of one layer but for adapters; names without ``decoder.layers.{i}.``."""
    own = ARCHITECTURES.traits(model.name).layer_shapes
    if own is not None:
        return dict((load_target(own) if isinstance(own, str) else own)(model))
    return gpt_layer_shapes(model)


def gpt_layer_shapes(model: ModelConfig) -> dict[str, Shape]:
    """:func:`layer_parameter_shapes` of GPT's block."""
    h = model.hidden_size
    q_width = model.num_attention_heads * model.head_size
    qkv_width = q_width + 2 * model.kv_heads * model.head_size
    fc1_width = model.ffn_size * (2 if model.is_gated else 1)
    shapes = dict(_norm("input_norm", model))
    shapes |= dict(_linear("attention.qkv", h, qkv_width, model.has_qkv_bias))
    if model.qk_layernorm:
        shapes |= dict(_norm("attention.q_norm", model, model.head_size))
        shapes |= dict(_norm("attention.k_norm", model, model.head_size))
    shapes |= dict(_linear("attention.out_proj", q_width, h, model.has_out_proj_bias))
    if model.sandwich_norm:
        shapes |= dict(_norm("attention_post_norm", model))
    shapes |= dict(_norm("mlp_norm", model))
    shapes |= dict(_linear("mlp.fc1", h, fc1_width, model.has_mlp_bias))
    shapes |= dict(_linear("mlp.fc2", model.ffn_size, h, model.has_mlp_bias))
    if model.sandwich_norm:
        shapes |= dict(_norm("mlp_post_norm", model))
    return shapes


def _adapter(weight: str, shape: Shape, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Parameters of the adapter beside a linear's weight, if it has one."""
    linear = weight.removesuffix(".weight")
    if model.lora is not None and linear != weight and model.lora.adapts(linear):
        yield f"{linear}.lora.a", (shape[0], model.lora.rank)
        yield f"{linear}.lora.b", (model.lora.rank, shape[1])


def trained_count(model: ModelConfig) -> int:
    """Number of parameters that train: all, or adapters and a classification head."""
    shapes = parameter_shapes(model)
    if model.lora is not None:
        shapes = {name: s for name, s in shapes.items() if ".lora." in name or name.startswith("score.")}
    return _count(shapes)


def _norm(name: str, model: ModelConfig, size: int | None = None) -> Iterator[tuple[str, Shape]]:
    for parameter in NORMS.traits(model.normalization).parameters:
        yield f"{name}.{parameter}", (size or model.hidden_size,)


def _linear(name: str, width_in: int, width_out: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width_in, width_out)
    if has_bias:
        yield f"{name}.bias", (width_out,)


def parameter_count(model: ModelConfig) -> int:
    """Number of parameters, a tied head counted once.

    With biases, LayerNorm, learned positions (P of them), MHA, f = 4h and a tied head this is
    12Lh^2 + 13Lh + (V + P)h + 2h (Narayanan et al. 2021, which leaves out the final norm's 2h).
    """
    return _count(parameter_shapes(model))


def _count(shapes: dict[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def flops_per_step(model: ModelConfig, batch_size: int, seq_len: int) -> int:
    """Floating-point operations of one optimizer step, forward and backward, by Megatron-LM's formula.

    Only matrix products count, a multiply-add as two; attention counts the causal half; recomputation does
    not count. Bs[6hfkL + 6(h(q + 2kv) + qh)L + 6hV] + 6Bs^2qL with k = 2 (3 for swiglu), which for plain
    GPT is 72BLsh^2(1 + s/12h + V/12hL).

    Args:
        model: the network.
        batch_size: sequences per step over the whole job.
        seq_len: tokens per sequence.
    """
    h, layers = model.hidden_size, model.num_layers
    q_width = model.num_attention_heads * model.head_size
    kv_width = model.kv_heads * model.head_size
    mlp_matrices = 3 if model.is_gated else 2
    mlp = h * model.ffn_size * mlp_matrices * layers
    projections = (h * (q_width + 2 * kv_width) + q_width * h) * layers
    per_token = 6 * (mlp + projections + h * model.padded_vocab_size)
    scores = 6 * batch_size * seq_len**2 * q_width * layers
    return batch_size * seq_len * per_token + scores
