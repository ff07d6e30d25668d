"""Our layers as tapes: what each operation writes, keeps and needs for a moment, by device and kernel.

Read from ``nn/`` and ``models/gpt/layers.py``, and compared with Paddle's allocator statistics on the CPU
(``tests/planner/test_memory.py``). Kernels:

``cpu``    ours on a CPU, in float32.
``gpu``    ours on a GPU: reference attention, or flash attention where the case says so.
``plugin`` ours on the device of a plugin (Ascend): as on a GPU, but Paddle composes the tensor-parallel loss.
``fused``  those of Megatron-LM and PaddleFleetX: scale, mask and softmax in one kernel that keeps the 16-bit
           result. For published runs.

Letters: tokens of a micro batch on this rank, u bytes of an activation of all of them, e bytes of a number.
"""

from __future__ import annotations

from functools import lru_cache

from ppfleetx.planner.case import Case, Recompute, alike
from ppfleetx.planner.tape import Step, Tape


class _Sizes:
    """Bytes of the tensors of one layer on one rank."""

    def __init__(self, case: Case) -> None:
        model, plan = case.model, case.plan
        self.case, self.model = case, model
        self.e = case.precision.activation_bytes
        self.tokens = case.micro_batch * case.seq_len / plan.sep
        self.split = plan.mp if plan.sequence_parallel else 1
        self.u = self.tokens * model.hidden_size * self.e
        self.part = self.u / self.split  # of this rank's positions
        self.q = self.tokens * model.num_attention_heads * model.head_size / plan.mp * self.e
        self.kv = self.tokens * model.kv_heads * model.head_size / plan.mp * self.e
        self.wide = self.tokens * model.ffn_size / plan.mp * self.e
        heads = model.num_attention_heads / (plan.mp * plan.sep)
        self.scores = case.micro_batch * heads * case.seq_len**2
        self.on_cpu, self.fused = case.kernels == "cpu", case.kernels == "fused"
        # Copies of the logits that the tensor-parallel loss needs for a moment, beside its softmax.
        self.loss_copies = {"cpu": 2, "plugin": 3}.get(case.kernels, 0) if plan.mp > 1 else 0
        precision = case.precision
        self.g = precision.gradient_bytes
        same = precision.gradient_bytes == precision.parameter_bytes
        self.low_share = 0.0 if same else precision.parameter_bytes / precision.gradient_bytes
        self.local_bias = self.on_cpu and plan.mp == 1

    def matrix(self, width_in: float, width_out: float) -> float:
        """Bytes of the gradient of a weight."""
        return width_in * width_out * self.g


def _norm(s: _Sizes, writes: str, reads: str, size: float | None = None) -> list[Step]:
    """A norm of the hidden states, or of a tensor of ``size`` bytes."""
    u = s.part if size is None else size
    if s.model.normalization == "RMSNorm" and not s.on_cpu and not s.fused:
        wide = u * 4 / s.e  # squares and products are of a float32 copy
        copy = Step(f"{writes} in float32", wide, (reads,), back=0.0)
        out = Step(
            writes,
            u,
            (copy.writes,),
            keeps=(copy.writes,),
            extra=u if s.e != 4 else 0.0,
            scratch=wide,
            back=2 * wide,
        )
        return [copy, out]
    scratch = u if s.model.normalization == "RMSNorm" else 0.0
    return [Step(writes, u, (reads,), keeps=(reads,), scratch=scratch, back=2 * u if s.on_cpu else 0.0)]


def _linear(
    s: _Sizes, writes: str, reads: str, size: float, weights: float, *, bias: bool, read: float
) -> list[Step]:
    """A product, and its bias, which our CPU layers spread over the rows by another product."""
    if bias and s.local_bias:
        product = Step(f"{writes} without bias", size, (reads,), keeps=(reads,), weights=weights)
        return [product, Step(writes, size, (product.writes,), scratch=size, back=size, reuses=True)]
    return [Step(writes, size, (reads,), keeps=(reads,), weights=weights)]


def _column(s: _Sizes, writes: str, reads: str, size: float, weights: float, *, bias: bool) -> list[Step]:
    """A column-parallel product; with sequence parallelism it gathers its input and keeps that."""
    if s.split == 1:
        return _linear(s, writes, reads, size, weights, bias=bias, read=s.u)
    gathered = Step(f"{reads} gathered", s.u, (reads,))
    return [gathered, *_linear(s, writes, gathered.writes, size, weights, bias=bias, read=s.u)]


def _row(s: _Sizes, writes: str, reads: str, weights: float, *, bias: bool) -> list[Step]:
    """A row-parallel product, its sum over the ranks, its bias."""
    if s.split == 1:
        return _linear(s, writes, reads, s.u, weights, bias=bias, read=s.u)
    whole = Step(f"{writes} before the sum", s.u, (reads,), keeps=(reads,), weights=weights)
    return [whole, Step(writes, s.part, (whole.writes,), scratch=s.part if bias else 0.0)]


def _dropout(s: _Sizes, writes: str, reads: str, size: float, probability: float) -> list[Step]:
    if probability == 0:
        return [Step(writes, size, (reads,), view=True)]
    return [Step(writes, size, (reads,), extra=size / s.e)]


def _project(s: _Sizes, recompute: Recompute) -> list[Step]:
    """Norm, projection, and what of it is copied before attention."""
    model, h = s.model, s.model.hidden_size
    width = (s.q + 2 * s.kv) / (s.tokens * s.e)
    steps = [*_norm(s, "normed", "x")]
    steps += _column(s, "qkv", "normed", s.q + 2 * s.kv, s.matrix(h, width), bias=model.has_qkv_bias)
    source = "qkv"
    if s.case.plan.sep > 1:
        whole = s.q + 2 * s.kv
        steps.append(Step("qkv exchanged", whole, (source,), scratch=2 * whole, back=2 * whole))
        source = "qkv exchanged"
    # What attention reads: views of the projection, or copies cut out of it. Queries are copied once more
    # when they are scaled, so that only a recomputed core or flash attention keeps the unscaled ones.
    keeps_queries = recompute == "core_attn" or s.case.flash
    kept = s.q * keeps_queries + 2 * s.kv
    whole = s.q + 2 * s.kv
    if not model.positions.rotates and not model.qk_layernorm:
        if model.kv_heads == model.num_attention_heads:
            return [*steps, Step("heads", whole, (source,), view=True)]
        return [*steps, Step("heads", kept, (source,), scratch=whole - kept, back=whole)]
    steps.append(Step("apart", whole, (source,), back=whole))
    turning, source = s.q + s.kv, "apart"
    if model.qk_layernorm:
        steps += _norm(s, "normed heads", source, turning)
        source = "normed heads"
    if model.positions.rotates:
        steps.append(_turned(s, source, turning))
        source = "turned"
    if s.on_cpu:
        kept -= s.kv  # values stay within "apart", which is kept
    return [*steps, Step("heads", kept, (source,), scratch=whole - kept, back=turning)]


def _turned(s: _Sizes, source: str, turning: float) -> Step:
    """Rotary positions of queries and keys."""
    part = turning * s.model.rotary_size / s.model.head_size
    wide = part * 4 / s.e
    if s.on_cpu:  # x cos + partners sin, with tables as large as x; both products keep their factors
        rotary = {"keeps": (source,), "extra": 3 * part, "scratch": 2 * part, "back": part}
    elif s.fused:
        rotary = {"keeps": ()}
    else:  # halves in float32
        rotary = {"extra": wide, "scratch": 2.5 * wide, "back": 2 * wide}
    return Step("turned", turning, (source,), **rotary)


def _core(s: _Sizes) -> list[Step]:
    """Scores, softmax, weights, context."""
    e, model, n = s.e, s.model, s.scores
    copies = s.kv  # keys and values are views: a product copies the one it reads
    if s.case.flash:
        rows = n / s.case.seq_len * 4  # log-sum-exp
        whole = s.q + 2 * s.kv
        return [
            Step(
                "context", s.q, ("heads",), keeps=("heads", "context"), extra=rows, scratch=whole, back=whole
            )
        ]
    # The fused kernel scales the scores, ours the queries.
    scaled = Step("scaled", s.q, ("heads",), view=s.fused)
    softmax_bytes = 4 if (model.softmax_in_fp32 and not s.fused) else e
    drop = model.attention_probs_dropout_prob
    steps = [
        scaled,
        Step(
            "scores",
            n * e,
            ("scaled", "heads"),
            keeps=("heads",) if s.fused else ("scaled", "heads"),
            scratch=copies,
            back=copies,
        ),
    ]
    source = "scores"
    if not s.fused:
        if softmax_bytes != e:
            steps.append(Step("wide scores", n * softmax_bytes, (source,)))
            steps.append(Step("unguarded", n * softmax_bytes, ("wide scores",), back=0.0))
            source = "unguarded"
        steps.append(Step("masked", n * softmax_bytes, (source,), reuses=True))
        source = "masked"
    steps.append(Step("softmax", n * softmax_bytes, (source,), keeps=("softmax",)))
    source = "softmax"
    if softmax_bytes != e:
        steps.append(Step("weights", n * e, (source,)))
        source = "weights"
    if drop:
        steps.append(Step("dropped", n * e, (source,), extra=n))
        source = "dropped"
    steps.append(
        Step("context", s.q, (source, "heads"), keeps=(source, "heads"), scratch=copies, back=copies)
    )
    return steps


def _attention(s: _Sizes, recompute: Recompute) -> list[Step]:
    model = s.model
    steps = _project(s, recompute)
    core = _core(s)
    heads = next(step.size for step in steps if step.writes == "heads")
    if recompute == "core_attn":
        tape = Tape({"heads": heads}, (*core, Step("flat", s.q, ("context",), back=0.0)))
        steps.append(Step("flat", s.q, ("heads",), inner=tape))
    else:
        steps += [*core, Step("flat", s.q, ("context",))]
    source = "flat"
    if s.case.plan.sep > 1:
        steps.append(Step("flat here", s.q, ("flat",), scratch=2 * s.q, back=2 * s.q))
        source = "flat here"
    width = s.q / (s.tokens * s.e)
    steps += _row(s, "branch", source, s.matrix(width, model.hidden_size), bias=model.has_out_proj_bias)
    steps += _dropout(s, "dropped branch", "branch", s.part, model.hidden_dropout_prob)
    if model.sandwich_norm:
        steps += _norm(s, "normed branch", "dropped branch")
    return steps


def _mlp(s: _Sizes) -> list[Step]:
    model, h = s.model, s.model.hidden_size
    width = s.wide / (s.tokens * s.e)
    gated = model.is_gated
    steps = _norm(s, "mlp normed", "x" if model.parallel_residual else "y")
    out = s.wide * (2 if gated else 1)
    steps += _column(s, "fc1", "mlp normed", out, s.matrix(h, out / s.wide * width), bias=model.has_mlp_bias)
    if gated and not s.on_cpu and not s.fused:  # one kernel, of a copy with gate and rest apart
        steps.append(Step("active", s.wide, ("fc1",), keeps=("fc1",), scratch=out - s.wide, back=out))
    elif gated:
        steps.append(Step("silu", s.wide, ("fc1",), keeps=("fc1",), back=s.wide))
        steps.append(Step("active", s.wide, ("silu", "fc1"), keeps=("silu", "fc1"), back=s.wide))
    elif model.hidden_act == "relu2":
        steps.append(Step("relu", s.wide, ("fc1",), keeps=("relu",)))
        steps.append(Step("active", s.wide, ("relu",), keeps=("relu",)))
    elif model.hidden_act == "quick_gelu":  # x sigmoid(1.702 x)
        steps.append(Step("sigmoid", s.wide, ("fc1",), keeps=("sigmoid",), scratch=s.wide, back=s.wide))
        steps.append(Step("active", s.wide, ("sigmoid", "fc1"), keeps=("sigmoid", "fc1")))
    else:
        keeps = ("active",) if model.hidden_act == "relu" else ("fc1",)
        steps.append(Step("active", s.wide, ("fc1",), keeps=keeps))
    steps += _row(s, "mlp branch", "active", s.matrix(width, h), bias=model.has_mlp_bias)
    steps += _dropout(s, "dropped mlp", "mlp branch", s.part, model.hidden_dropout_prob)
    if model.sandwich_norm:
        steps += _norm(s, "normed mlp", "dropped mlp")
    return steps


def layer_tape(case: Case, recompute: Recompute) -> Tape:
    """One transformer layer."""
    return _layer_tape(alike(case), recompute)


@lru_cache(maxsize=2048)
def _layer_tape(case: Case, recompute: Recompute) -> Tape:
    s = _Sizes(case)
    x = {"x": s.part}
    attention = _attention(s, recompute)
    if recompute == "full_attn":
        branch = attention[-1].writes
        attention = [Step(branch, s.part, ("x",), inner=Tape(x, tuple(attention), s.low_share))]
    sum_attention = Step("y", s.part, ("x", attention[-1].writes))
    mlp = _mlp(s)
    steps = (*attention, sum_attention, *mlp, Step("out", s.part, ("y", mlp[-1].writes)))
    if recompute != "full":
        return Tape(x, steps, s.low_share)
    return Tape(x, (Step("out", s.part, ("x",), inner=Tape(x, steps, s.low_share)),))


def embedding_tape(case: Case) -> Tape:
    """Ids to the hidden states."""
    return _embedding_tape(alike(case))


@lru_cache(maxsize=1024)
def _embedding_tape(case: Case) -> Tape:
    s = _Sizes(case)
    model, ids = s.model, s.tokens * 8
    rows = model.padded_vocab_size / case.plan.mp
    steps = [Step("words", s.u, ("ids",), extra=2 * ids, weights=s.matrix(rows, model.hidden_size))]
    if model.positions.has_table:
        table = s.matrix(model.max_position_embeddings, model.hidden_size)
        steps.append(Step("positions", s.u, ("ids",), weights=table))
        steps.append(Step("sum", s.u, ("words", "positions")))
    if s.split > 1:
        steps.append(Step("part", s.part, (steps[-1].writes,)))
    steps += _dropout(s, "out", steps[-1].writes, s.part, model.embedding_dropout)
    return Tape({"ids": 0.0}, tuple(steps), s.low_share)


def head_tape(case: Case) -> Tape:
    """Final norm, logits and the loss of a micro batch."""
    return _head_tape(alike(case))


@lru_cache(maxsize=1024)
def _head_tape(case: Case) -> Tape:
    s = _Sizes(case)
    model, t = s.model, case.plan.mp
    columns = (model.num_classes or 1) if model.task.classifies else model.padded_vocab_size / t
    elements = s.tokens * columns
    weights = s.matrix(columns, model.hidden_size)
    steps = [*_norm(s, "normed", "x")]
    source = "normed"
    if s.split > 1:
        steps.append(Step("whole", s.u, ("normed",)))
        source = "whole"
    if model.loss_chunks > 1 and not model.task.classifies:
        steps.append(_loss_in_pieces(s, source, columns))
        return Tape({"x": s.part}, tuple(steps), s.low_share)
    steps.append(Step("logits", elements * s.e, (source,), keeps=(source,), weights=weights))
    source = "logits"
    if s.e != 4:
        steps.append(Step("wide logits", elements * 4, (source,), back=0.0))
        source = "wide logits"
    if model.padded_vocab_size != model.vocab_size and not model.task.classifies:
        steps.append(Step("hidden padding", elements * 4, (source,), reuses=True))
        source = "hidden padding"
    softmax, named = elements * 4, elements * s.e if s.e != 4 else 0.0  # the caller has the logits by name
    scratch = max(named, s.loss_copies * softmax)
    # On a CPU, one copy on the way back; else the gradient of the logits is written over the softmax.
    back = softmax if t > 1 and s.on_cpu else -softmax
    steps.append(Step("loss", 0.0, (source,), extra=softmax, scratch=scratch, back=back, no_values=True))
    return Tape({"x": s.part}, tuple(steps), s.low_share)


def _loss_in_pieces(s: _Sizes, source: str, columns: float) -> Step:
    """Head and loss of ``Model.loss_chunks``, whose gradients are made in the forward pass."""
    model = s.model
    piece = s.tokens * columns / min(model.loss_chunks, s.case.seq_len / s.case.plan.sep)
    wide = 4.0 * piece
    copies = 1 + (s.e != 4) + (model.padded_vocab_size != model.vocab_size) + s.loss_copies
    weights, sums = s.matrix(columns, model.hidden_size), columns * model.hidden_size * 4
    return Step(
        "loss",
        0.0,
        (source,),
        extra=s.u + sums,
        scratch=piece * s.e + copies * wide + columns * model.hidden_size * s.e,
        back=-s.u - (weights if s.e == 4 else 0.0),
        weights=weights,
    )
