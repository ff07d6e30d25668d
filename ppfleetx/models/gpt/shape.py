"""Parameters and floating-point operations of a GPT, by arithmetic alone.

Letters: B global batch, s sequence length, h hidden size, f MLP width, L layers, V padded vocabulary,
q width of all query heads, kv width of all key (or value) heads.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ppfleetx.config.registries import ARCHITECTURES, NORMS
from ppfleetx.config.registry import load_target
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.nn import layer_params
from ppfleetx.nn.init import Constant
from ppfleetx.nn.layer_params import Specs
from ppfleetx.nn.param_spec import REPLICATE, ParamSpec, Part, Shard, dense

Shape = tuple[int, ...]

_INIT = Constant(0.0)  # the stages say how values are drawn (models/gpt/stages.py)


def parameter_specs(model: ModelConfig) -> dict[str, ParamSpec]:
    """Canonical name -> declaration of every parameter, in model order. Linear weights are [in, out].

    A classification head has `num_classes` outputs, which a loaded configuration knows. Gradients are those
    of a plan with sequence parallelism; initial values are left out.
    """
    h, vocab, trains = model.hidden_size, model.padded_vocab_size, model.lora is None
    specs = _within("embedding.word_embeddings", layer_params.word_table(vocab, h, init=_INIT))
    if model.positions.has_table:
        table = layer_params.position_table(model.max_position_embeddings, h, init=_INIT)
        specs |= _within("embedding.position_embeddings", table)
    layer = layer_parameter_specs(model)
    for index in range(model.num_layers):
        for name, spec in layer.items():
            specs[f"decoder.layers.{index}.{name}"] = spec
            specs |= _adapter(f"decoder.layers.{index}.{name}", spec, model)
    specs |= _norm("decoder.final_norm", model)
    if not model.task.classifies and not model.tie_word_embeddings:
        head = layer_params.column_linear(h, vocab, bias=model.has_head_bias, init=_INIT, kind="head")
        specs |= _within("head", head)
    specs = {name: replace(spec, trains=trains or ".lora." in name) for name, spec in specs.items()}
    if model.task.classifies:
        score = layer_params.whole_linear(h, model.num_classes or 0, bias=False, init=_INIT)
        specs |= _within("score", score)
    return {name: replace(spec, name=name) for name, spec in specs.items()}


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> global shape of every parameter, in model order."""
    return {name: spec.shape for name, spec in parameter_specs(model).items()}


def layer_parameter_specs(model: ModelConfig) -> dict[str, ParamSpec]:
    """Parameters of one layer but for adapters; names without ``decoder.layers.{i}.``.

    An architecture declares its own with ``layer_shapes``. Where it gives no more than a shape, a parameter
    with a name of GPT's block lies where that one does; of the others, matrices are sliced by columns.
    """
    own = ARCHITECTURES.traits(model.name).layer_shapes
    known = gpt_layer_specs(model)
    if own is None:
        return known
    given = (load_target(own) if isinstance(own, str) else own)(model)
    return {
        name: shape if isinstance(shape, ParamSpec) else _of_shape(tuple(shape), known.get(name))
        for name, shape in given.items()
    }


def _of_shape(shape: Shape, like: ParamSpec | None) -> ParamSpec:
    if like is not None and len(like.shape) == len(shape):
        return replace(like, shape=shape)
    is_matrix = len(shape) > 1
    mp = Shard(len(shape) - 1) if is_matrix else REPLICATE
    return dense(shape, _INIT, "matrix" if is_matrix else "norm", mp=mp, partial=not is_matrix)


def gpt_layer_specs(model: ModelConfig) -> dict[str, ParamSpec]:
    """:func:`layer_parameter_specs` of GPT's block."""
    h = model.hidden_size
    q_width = model.num_attention_heads * model.head_size
    qkv = layer_params.qkv_parts(model.num_attention_heads // model.kv_heads, model.head_size)
    gate = layer_params.GATE_AND_UP if model.is_gated else ()
    fc1_width = model.ffn_size * (len(gate) or 1)
    specs = _norm("input_norm", model)
    qkv_width = q_width + 2 * model.kv_heads * model.head_size
    specs |= _column("attention.qkv", h, qkv_width, model.has_qkv_bias, qkv)
    if model.qk_layernorm:
        specs |= _norm("attention.q_norm", model, model.head_size)
        specs |= _norm("attention.k_norm", model, model.head_size)
    specs |= _row("attention.out_proj", q_width, h, model.has_out_proj_bias)
    if model.sandwich_norm:
        specs |= _norm("attention_post_norm", model)
    specs |= _norm("mlp_norm", model)
    specs |= _column("mlp.fc1", h, fc1_width, model.has_mlp_bias, gate)
    specs |= _row("mlp.fc2", model.ffn_size, h, model.has_mlp_bias)
    if model.sandwich_norm:
        specs |= _norm("mlp_post_norm", model)
    return specs


def _within(layer: str, specs: Specs) -> Specs:
    return {f"{layer}.{name}": spec for name, spec in specs.items()}


def _column(name: str, width_in: int, width_out: int, bias: bool, parts: tuple[Part, ...]) -> Specs:
    return _within(name, layer_params.column_linear(width_in, width_out, bias=bias, init=_INIT, parts=parts))


def _row(name: str, width_in: int, width_out: int, bias: bool) -> Specs:
    specs = layer_params.row_linear(width_in, width_out, bias=bias, init=_INIT, sequence_parallel=True)
    return _within(name, specs)


def _norm(name: str, model: ModelConfig, size: int | None = None) -> Specs:
    names = NORMS.traits(model.normalization).parameters
    return _within(name, layer_params.norm(names, size or model.hidden_size, partial=True))


def _adapter(weight: str, matrix: ParamSpec, model: ModelConfig) -> Specs:
    """Parameters of the adapter beside a linear's weight, if it has one."""
    linear = weight.removesuffix(".weight")
    if model.lora is None or linear == weight or not model.lora.adapts(linear):
        return {}
    adapter = layer_params.adapter(matrix, model.lora.rank, sequence_parallel=True)
    return _within(f"{linear}.lora", adapter)


def trained_count(model: ModelConfig) -> int:
    """Number of parameters that train: all, or adapters and a classification head."""
    return sum(math.prod(spec.shape) for spec in parameter_specs(model).values() if spec.trains)


def parameter_count(model: ModelConfig) -> int:
    """Number of parameters, a tied head counted once.

    With biases, LayerNorm, learned positions (P of them), MHA, f = 4h and a tied head this is
    12Lh^2 + 13Lh + (V + P)h + 2h (Narayanan et al. 2021, which leaves out the final norm's 2h).
    """
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


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
