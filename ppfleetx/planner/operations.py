"""What one rank computes for one micro batch: floating-point operations and bytes, no seconds.

Letters: b micro batch, s sequence length, t tensor-parallel degree, e bytes of an activation, T tokens of
the micro batch on this rank (b s / sep), q the tokens' further division by sequence parallelism (t or 1).
A multiply-add counts as two operations. Attention counts all pairs of positions, as the Megatron papers do
and as a kernel without causal skipping computes them; fused attention skips the upper half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ppfleetx.planner.case import Case

Kind = Literal["matmul", "scores", "flash", "elementwise"]
Part = Literal["attention", "core", "mlp", "edge"]


@dataclass(frozen=True)
class Operation:
    """One operation of a forward pass and what it costs in the backward pass.

    Attributes:
        name: for the account.
        kind: ``matmul`` of weights, ``scores`` (batched product of activations), ``flash``, ``elementwise``.
        part: which recompute granularity repeats it: ``core`` is within ``attention``.
        flops: of the forward pass; the backward pass takes twice as many (2.5 times with flash, which
            computes the scores again).
        num_bytes: read and written in the forward pass beside what a product streams anyway.
        backward_bytes: the same in the backward pass.
        kernels: launches of the forward pass.
        narrowest: least dimension of a product of weights; 0 for all others.
        operands: elements of input and output of a product of weights: what its weight's gradient is made of.
    """

    name: str
    kind: Kind
    part: Part
    flops: float = 0.0
    num_bytes: float = 0.0
    backward_bytes: float = 0.0
    kernels: int = 1
    narrowest: float = 0.0
    operands: float = 0.0


def layer_operations(case: Case) -> list[Operation]:
    """Operations of one transformer layer on one rank."""
    return [*_attention(case), *_mlp(case)]


def _tokens(case: Case) -> float:
    return case.micro_batch * case.seq_len / case.plan.sep


def _split(case: Case) -> int:
    """Division of norms, dropouts and residual additions by sequence parallelism."""
    return case.plan.mp if case.plan.sequence_parallel else 1


def _matmul(name: str, part: Part, rows: float, width_in: float, width_out: float) -> Operation:
    return Operation(
        name,
        "matmul",
        part,
        flops=2 * rows * width_in * width_out,
        narrowest=min(rows, width_in, width_out),
        operands=rows * (width_in + width_out),
    )


def _elementwise(name: str, part: Part, forward: float, backward: float, kernels: int = 1) -> Operation:
    return Operation(name, "elementwise", part, 0.0, forward, backward, kernels)


def _norm(name: str, part: Part, case: Case) -> Operation:
    moved = _tokens(case) * case.model.hidden_size * case.precision.activation_bytes / _split(case)
    return _elementwise(name, part, 2 * moved, 4 * moved)


def _residual(name: str, part: Part, case: Case) -> Operation:
    """Dropout of a branch and its addition: two inputs, the sum, one byte of mask."""
    values = _tokens(case) * case.model.hidden_size / _split(case)
    e, mask = case.precision.activation_bytes, int(case.model.hidden_dropout_prob > 0)
    return _elementwise(name, part, values * (3 * e + mask), values * (2 * e + mask), 1 + mask)


def _attention(case: Case) -> Iterator[Operation]:
    model, t, e = case.model, case.plan.mp, case.precision.activation_bytes
    tokens, h = _tokens(case), model.hidden_size
    q_width = model.num_attention_heads * model.head_size / t
    kv_width = model.kv_heads * model.head_size / t
    yield _norm("input norm", "attention", case)
    yield _matmul("qkv", "attention", tokens, h, q_width + 2 * kv_width)
    moved = tokens * (q_width + 2 * kv_width) * e
    yield _elementwise("qkv apart", "attention", 2 * moved, 2 * moved)
    if model.qk_layernorm:
        normed = tokens * (q_width + kv_width) * e
        yield _elementwise("norm of queries and keys", "attention", 2 * normed, 4 * normed, 2)
    if model.positions.rotates:
        turned = tokens * (q_width + kv_width) * e
        yield _elementwise("rotary positions", "attention", 3 * turned, 3 * turned, 2)
    yield from _core(case)
    yield _elementwise("context together", "core", 2 * tokens * q_width * e, 2 * tokens * q_width * e)
    yield _matmul("output projection", "attention", tokens, q_width, h)
    yield _residual("attention residual", "attention", case)
    if model.sandwich_norm:
        yield _norm("norm after attention", "attention", case)


def _core(case: Case) -> Iterator[Operation]:
    """Scores, softmax, context: of whole sequences, with the heads divided by tensor and context ranks."""
    model, e = case.model, case.precision.activation_bytes
    heads = model.num_attention_heads / (case.plan.mp * case.plan.sep)
    pairs = case.micro_batch * heads * case.seq_len**2
    product = 2 * pairs * model.head_size
    if case.flash:
        yield Operation("flash attention", "flash", "core", flops=product)  # half of two products
        return
    yield Operation("scores", "scores", "core", product, pairs * e, pairs * e)
    yield _elementwise("softmax", "core", 2 * pairs * e, 3 * pairs * e)
    if model.attention_probs_dropout_prob > 0:
        yield _elementwise("attention dropout", "core", pairs * (2 * e + 1), pairs * (2 * e + 1))
    yield Operation("context", "scores", "core", product, pairs * e, pairs * e)


def _mlp(case: Case) -> Iterator[Operation]:
    model, e, t = case.model, case.precision.activation_bytes, case.plan.mp
    tokens, h, width = _tokens(case), model.hidden_size, model.ffn_size / t
    gates = 2 if model.is_gated else 1
    yield _norm("mlp norm", "mlp", case)
    yield _matmul("fc1", "mlp", tokens, h, gates * width)
    moved = tokens * width * e
    yield _elementwise("activation", "mlp", (gates + 1) * moved, (2 * gates + 1) * moved, gates)
    yield _matmul("fc2", "mlp", tokens, width, h)
    yield _residual("mlp residual", "mlp", case)
    if model.sandwich_norm:
        yield _norm("norm after mlp", "mlp", case)


def embedding_operations(case: Case) -> list[Operation]:
    """Operations of the first stage's embedding."""
    values = _tokens(case) * case.model.hidden_size
    e = case.precision.activation_bytes
    tables = 2 if case.model.positions.has_table else 1
    return [_elementwise("embedding", "edge", values * e * (tables + 3), values * e * (tables + 3), 3)]


def head_operations(case: Case) -> list[Operation]:
    """Final norm, logits and loss on the last stage."""
    e, vocabulary = case.precision.activation_bytes, case.model.padded_vocab_size / case.plan.mp
    if case.model.task.classifies:
        vocabulary = case.model.num_classes or 1
    tokens = _tokens(case)
    logits = tokens * vocabulary
    return [
        _norm("final norm", "edge", case),
        _matmul("logits", "edge", tokens, case.model.hidden_size, vocabulary),
        _elementwise("loss", "edge", logits * (e + 4 + 4), logits * (4 + 4 + e), 4),
    ]


def backward_flops(operation: Operation) -> float:
    """Floating-point operations of its backward pass."""
    return operation.flops * (2.5 if operation.kind == "flash" else 2.0)


def repeats(operation: Operation, recompute: str) -> bool:
    """Whether ``recompute`` (a granularity) computes the operation again in the backward pass."""
    parts = {
        "none": (),
        "core_attn": ("core",),
        "full_attn": ("core", "attention"),
        "full": ("core", "attention", "mlp"),
    }
    return operation.part in parts[recompute]
