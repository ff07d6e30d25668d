"""Declarations of self-attention and latent attention: sizes, parameters and cost. Does not import Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ppfleetx.nn.activation_memory import Step, Tape
from ppfleetx.nn.cost import Operation, Work, elementwise
from ppfleetx.nn.init import Init
from ppfleetx.nn.layer_spec import LinearSpec, NormSpec, Specs, parameters_within
from ppfleetx.nn.param_spec import Part

# Short names of local variables in this file are sizes in bytes on one rank. q: all queries. kv: all keys, or
# all values, which have the same size in self-attention. v: all values in latent attention. e: one number.


def qkv_parts(queries_per_group: int, head_dim: int) -> tuple[Part, ...]:
    """Return the columns of queries, keys and values in a fused attention projection, as three :class:`Part`
    objects. The columns are ordered ``[key/value head][query ... query, key, value][head_dim]``."""
    return parts_of({"q": queries_per_group * head_dim, "k": head_dim, "v": head_dim})


def parts_of(widths: Mapping[str, int]) -> tuple[Part, ...]:
    """Return the columns of each matrix inside a fused matrix, as one :class:`Part` object per matrix. The
    fused matrix repeats one pattern (period): some columns of the first matrix, then some of the second, and
    so on.

    Args:
        widths: number of columns of each matrix (such as query, key and value) in one period, by name.
    """
    period, parts, end = sum(widths.values()), [], 0
    for name, width in widths.items():
        parts.append(Part(name, 1, period, end, width))
        end += width
    return tuple(parts)


@dataclass(frozen=True)
class AttentionSpec:
    """Declaration of causal self-attention.

    Attributes:
        layer: the layer class that is built from this declaration, or its ``module:class`` name. A subclass
            of the declaration can override it.
        num_kv_heads: number of key and value heads, a divisor of ``num_heads`` (grouped-query attention,
            Ainslie et al., 2023).
        init: initial values of the projection to queries, keys and values.
        output_init: initial values of the output projection.
        window: number of earlier positions that a position attends to; None: all.
        head_norm: norm of queries and keys (Henry et al., 2020); None: no norm.
        rotary_size: number of features of each head that rotary positions rotate; None: no rotary positions.
        has_biases: whether linear biases by distance are added to the scores (ALiBi, Press et al., 2022).
        score_scale: number by which scores are multiplied; None: ``1 / sqrt(head_dim)``.
        softcap: soft cap of the scores; None: no cap.
    """

    layer: ClassVar[str | Callable[..., Any]] = "ppfleetx.nn.attention:Attention"

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    init: Init
    output_init: Init
    dropout: float = 0.0
    window: int | None = None
    head_norm: NormSpec | None = None
    rotary_size: int | None = None
    has_biases: bool = False
    score_scale: float | None = None
    softcap: float | None = None
    softmax_in_fp32: bool = True

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Total width of all key heads, and also of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def score_macs_per_pair(self) -> int:
        """Number of multiply-adds per pair of a query and a key position, to compute the scores and the
        context of all heads."""
        return 2 * self.q_width

    @property
    def queries_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv(self) -> LinearSpec:
        """The projection to queries, keys and values, with columns grouped by key/value head."""
        width = self.q_width + 2 * self.kv_width
        parts = qkv_parts(self.queries_per_group, self.head_dim)
        return LinearSpec(self.hidden_size, width, "columns", self.qkv_bias, self.init, parts=parts)

    @property
    def out_proj(self) -> LinearSpec:
        return LinearSpec(self.q_width, self.hidden_size, "rows", self.output_bias, self.output_init)

    @property
    def norms(self) -> tuple[NormSpec, NormSpec] | tuple[None, None]:
        if self.head_norm is None or not self.head_norm.has_gain_per_head:
            return self.head_norm, self.head_norm
        return replace(self.head_norm, size=self.q_width), replace(self.head_norm, size=self.kv_width)

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        q_norm, k_norm = self.norms
        layers = {"qkv": self.qkv, "q_norm": q_norm, "k_norm": k_norm, "out_proj": self.out_proj}
        return parameters_within(layers.items(), sequence_parallel=sequence_parallel)

    def exchanged_bytes(self, work: Work) -> tuple[float, float]:
        """Return two numbers of bytes: those that a context-parallel rank exchanges before attention, and
        those that it exchanges after attention."""
        each = work.tokens * self.head_dim / work.mp * work.activation_bytes
        return (self.num_heads + 2 * self.num_kv_heads) * each, self.num_heads * each

    def operations(self, work: Work) -> Iterator[Operation]:
        q, kv = (work.bytes_of(width / work.mp) for width in (self.q_width, self.kv_width))
        yield self.qkv.operation("qkv", "attention", work)
        yield elementwise("qkv apart", "attention", 2 * (q + 2 * kv), 2 * (q + 2 * kv))
        if self.head_norm is not None:
            yield elementwise("norm of queries and keys", "attention", 2 * (q + kv), 4 * (q + kv), 2)
        if self.rotary_size is not None:
            yield elementwise("rotary positions", "attention", 3 * (q + kv), 3 * (q + kv), 2)
        yield from core_operations(work, self.num_heads, self.head_dim, self.head_dim, self.dropout)
        yield elementwise("context together", "core", 2 * q, 2 * q)
        yield self.out_proj.operation("output projection", "attention", work)

    def tape(self, work: Work, writes: str, reads: str, *, recompute_core: bool = False) -> list[Step]:
        q = work.bytes_of(self.q_width / work.mp)
        steps = [*self.qkv.tape(work, "qkv", reads), *self._heads(work, keeps_queries=recompute_core)]
        kv = work.bytes_of(self.kv_width / work.mp)
        is_capped = self.softcap is not None
        sizes = CoreSizes(self.num_heads, q, kv, kv, q, self.dropout, self.softmax_in_fp32, is_capped)
        steps += sizes.tape(work, steps[-1].size, recompute=recompute_core)
        return [*steps, *self.out_proj.tape(work, writes, steps[-1].writes)]

    def _heads(self, work: Work, *, keeps_queries: bool) -> list[Step]:
        """Return the operations between the fused projection and the attention core, for the memory
        simulation (:mod:`ppfleetx.nn.activation_memory`). These are the norms, the context-parallel exchange,
        the split into heads, and the rotary embedding.

        Args:
            keeps_queries: whether queries are kept for the backward pass. Flash attention always keeps them.
        """
        q, kv = (work.bytes_of(width / work.mp) for width in (self.q_width, self.kv_width))
        whole, turning = q + 2 * kv, q + kv
        kept = q * (keeps_queries or work.flash) + 2 * kv
        steps, source, each = [], "qkv", self.head_norm
        if each is not None and each.has_gain_per_head:  # before positions are exchanged
            steps += each.tape(work, "normed", "qkv", turning)
            steps.append(Step("qkv normed", whole, ("normed",), backward_scratch=whole))
            source, each = "qkv normed", None
        if work.sep > 1:
            steps.append(
                Step("qkv exchanged", whole, (source,), scratch=2 * whole, backward_scratch=2 * whole)
            )
            source = "qkv exchanged"
        if self.rotary_size is None and each is None:
            if self.queries_per_group == 1:
                return [*steps, Step("heads", whole, (source,), view=True)]
            return [*steps, Step("heads", kept, (source,), scratch=whole - kept, backward_scratch=whole)]
        steps.append(Step("apart", whole, (source,), backward_scratch=whole))
        if each is not None:
            steps += each.tape(work, "normed heads", "apart", turning)
        if self.rotary_size is not None:
            steps.append(self._turned(work, steps[-1].writes, turning))
        if work.on_cpu:
            kept -= kv  # values remain views of "apart", which is kept
        return [
            *steps,
            Step("heads", kept, (steps[-1].writes,), scratch=whole - kept, backward_scratch=turning),
        ]

    def _turned(self, work: Work, source: str, turning: float) -> Step:
        part = turning * self.rotary_size / self.head_dim
        wide = part * 4 / work.activation_bytes
        if work.on_cpu:  # x * cos + partner * sin, with tables as large as x; both products keep their inputs
            return Step(
                "turned",
                turning,
                (source,),
                (source,),
                extra=3 * part,
                scratch=2 * part,
                backward_scratch=part,
            )
        if work.fused:
            return Step("turned", turning, (source,))
        # in float32
        return Step("turned", turning, (source,), extra=wide, scratch=2.5 * wide, backward_scratch=2 * wide)


def _pairs(work: Work, num_heads: int) -> float:
    """Return the number of attention scores that one rank computes."""
    return work.micro_batch * (num_heads / (work.mp * work.sep)) * work.seq_len**2


def core_operations(
    work: Work, num_heads: int, key_dim: int, value_dim: int, dropout: float
) -> Iterator[Operation]:
    """Yield the operations that compute scores, softmax and context. ``key_dim`` and ``value_dim`` are the
    widths of a head's keys and values."""
    pairs, e = _pairs(work, num_heads), work.activation_bytes
    if work.flash:
        half = pairs * (key_dim + value_dim)  # flops of two matmuls, causal half
        yield Operation("flash attention", "flash", "core", flops=half)
        return
    yield Operation("scores", "scores", "core", 2 * pairs * key_dim, pairs * e, pairs * e)
    yield elementwise("softmax", "core", 2 * pairs * e, 3 * pairs * e)
    if dropout > 0:
        yield elementwise("attention dropout", "core", pairs * (2 * e + 1), pairs * (2 * e + 1))
    yield Operation("context", "scores", "core", 2 * pairs * value_dim, pairs * e, pairs * e)


@dataclass(frozen=True)
class CoreSizes:
    """Sizes of the attention core (scores, softmax, context) on one rank.

    Attributes:
        num_heads: number of query heads of the whole model.
        query, key, value, context: bytes of each tensor on this rank.
    """

    num_heads: int
    query: float
    key: float
    value: float
    context: float
    dropout: float
    softmax_in_fp32: bool
    capped: bool = False

    def tape(self, work: Work, qkv_bytes: float, *, recompute: bool) -> list[Step]:
        """Return the operations of the attention core (scores, softmax and context) for the memory simulation
        (:mod:`ppfleetx.nn.activation_memory`).

        Args:
            qkv_bytes: bytes of the queries, keys and values that are kept for the backward pass.
            recompute: whether the backward pass recomputes the attention core.
        """
        core = self._steps(work)
        if recompute:
            inner = Tape(
                {"heads": qkv_bytes}, (*core, Step("flat", self.context, ("context",), backward_scratch=0.0))
            )
            steps = [Step("flat", self.context, ("heads",), inner=inner)]
        else:
            steps = [*core, Step("flat", self.context, ("context",))]
        if work.sep > 1:
            twice = 2 * self.context
            steps.append(Step("flat here", self.context, ("flat",), scratch=twice, backward_scratch=twice))
        return steps

    def _steps(self, work: Work) -> list[Step]:
        n, e = _pairs(work, self.num_heads), work.activation_bytes
        whole = self.query + self.key + self.value
        if work.flash:
            rows, keeps = n / work.seq_len * 4, ("heads", "context")  # log-sum-exp
            return [
                Step(
                    "context",
                    self.context,
                    ("heads",),
                    keeps,
                    extra=rows,
                    scratch=whole,
                    backward_scratch=whole,
                )
            ]
        # Megatron-LM's fused kernel scales the scores; the reference kernel scales the queries. Keys and
        # values are views, so a matmul copies them.
        keeps = ("heads",) if work.fused else ("scaled", "heads")
        steps = [
            Step("scaled", self.query, ("heads",), view=work.fused),
            Step("scores", n * e, ("scaled", "heads"), keeps, scratch=self.key, backward_scratch=self.key),
        ]
        softmax_bytes = 4 if self.softmax_in_fp32 and not work.fused else e
        if self.capped:
            steps.append(Step("capped", n * e, ("scores",), keeps=("capped",)))
        if not work.fused:
            if softmax_bytes != e:
                steps.append(Step("wide scores", n * softmax_bytes, (steps[-1].writes,)))
                steps.append(Step("unguarded", n * softmax_bytes, ("wide scores",), backward_scratch=0.0))
            steps.append(Step("masked", n * softmax_bytes, (steps[-1].writes,), reuses=True))
        steps.append(Step("softmax", n * softmax_bytes, (steps[-1].writes,), keeps=("softmax",)))
        if softmax_bytes != e:
            steps.append(Step("weights", n * e, ("softmax",)))
        if self.dropout > 0:
            steps.append(Step("dropped", n * e, (steps[-1].writes,), extra=n))
        reads = (steps[-1].writes, "heads")
        return [
            *steps,
            Step("context", self.context, reads, reads, scratch=self.value, backward_scratch=self.value),
        ]


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Declaration of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024).

    Attributes:
        layer: the layer class that is built from this declaration, or its ``module:class`` name. A subclass
            of the declaration can override it.
        q_rank: width of the compressed queries; None: queries are projected from the hidden states.
        kv_rank: width of the compressed vector from which keys and values are projected.
        rope_head_dim: number of features of each query and key that rotary positions rotate.
        nope_head_dim: number of the other features of each query and key.
        norm: kind and epsilon of the norms of compressed vectors.
        down_bias: whether the projections to compressed vectors have a bias.
        init: initial values of all projections except the output projection.
        output_init: initial values of the output projection.
        window: number of earlier positions that a position attends to; None: all.
        score_factor: number by which scores are multiplied, in addition to ``1 / sqrt(head_dim)``.
    """

    layer: ClassVar[str | Callable[..., Any]] = "ppfleetx.nn.attention:LatentAttention"

    hidden_size: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    rope_head_dim: int
    nope_head_dim: int
    value_head_dim: int
    norm: tuple[str, float]
    down_bias: bool
    output_bias: bool
    init: Init
    output_init: Init
    dropout: float = 0.0
    window: int | None = None
    score_factor: float = 1.0
    softmax_in_fp32: bool = True

    @property
    def head_dim(self) -> int:
        return self.nope_head_dim + self.rope_head_dim

    @property
    def score_macs_per_pair(self) -> int:
        """Number of multiply-adds per pair of a query and a key position, to compute the scores and the
        context of all heads."""
        return self.num_heads * (self.head_dim + self.value_head_dim)

    @property
    def q_down(self) -> LinearSpec | None:
        return None if self.q_rank is None else self._down(self.q_rank)

    @property
    def q_norm(self) -> NormSpec | None:
        return None if self.q_rank is None else NormSpec(self.norm[0], self.q_rank, self.norm[1])

    @property
    def q_up(self) -> LinearSpec:
        """The projection from compressed queries to queries, with ``nope_head_dim + rope_head_dim`` columns
        per head. If ``q_rank`` is None, its input is the hidden states."""
        width_in = self.hidden_size if self.q_rank is None else self.q_rank
        return self._up(width_in, {"q": self.head_dim})

    @property
    def kv_down(self) -> LinearSpec:
        """The projection from hidden states to the compressed vector and the rotary features of keys."""
        return self._down(self.kv_rank + self.rope_head_dim)

    @property
    def kv_norm(self) -> NormSpec:
        return NormSpec(self.norm[0], self.kv_rank, self.norm[1])

    @property
    def kv_up(self) -> LinearSpec:
        """The projection from the compressed vector to values and to the features of keys that are not
        rotated. It has ``nope_head_dim + value_head_dim`` columns per head."""
        return self._up(self.kv_rank, {"k": self.nope_head_dim, "v": self.value_head_dim})

    @property
    def out_proj(self) -> LinearSpec:
        width = self.num_heads * self.value_head_dim
        return LinearSpec(width, self.hidden_size, "rows", self.output_bias, self.output_init)

    def _down(self, width: int) -> LinearSpec:
        """Declare a projection to a compressed vector. Every tensor-parallel rank computes the whole
        vector."""
        return LinearSpec(
            self.hidden_size, width, "whole", self.down_bias, self.init, input_is_sequence_parallel=True
        )

    def _up(self, width_in: int, widths: dict[str, int]) -> LinearSpec:
        parts, period = parts_of(widths), sum(widths.values())
        width = self.num_heads * period
        return LinearSpec(width_in, width, "columns", bias=False, init=self.init, parts=parts)

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        names = ("q_down", "q_norm", "q_up", "kv_down", "kv_norm", "kv_up", "out_proj")
        layers = ((name, getattr(self, name)) for name in names)
        return parameters_within(layers, sequence_parallel=sequence_parallel)

    def exchanged_bytes(self, work: Work) -> tuple[float, float]:
        """Return two numbers of bytes: those that a context-parallel rank exchanges before attention, and
        those that it exchanges after attention."""
        q, v = self._bytes(work)
        return 2 * q + v, v

    def _bytes(self, work: Work) -> tuple[float, float]:
        """Return the bytes of all queries on one rank, and the bytes of all values. Keys take as many bytes
        as queries."""
        here = self.num_heads / work.mp
        return work.bytes_of(here * self.head_dim), work.bytes_of(here * self.value_head_dim)

    def operations(self, work: Work) -> Iterator[Operation]:
        q, v = self._bytes(work)
        turning = q * self.rope_head_dim / self.head_dim
        if self.q_down is not None:
            yield self.q_down.operation("queries down", "attention", work)
            yield self.q_norm.operation("norm of queries", "attention", work)
        yield self.q_up.operation("queries up", "attention", work)
        yield self.kv_down.operation("keys and values down", "attention", work)
        yield self.kv_norm.operation("norm of keys and values", "attention", work)
        yield self.kv_up.operation("keys and values up", "attention", work)
        yield elementwise("rotary positions", "attention", 3 * turning, 3 * turning, 2)
        yield elementwise("heads", "attention", 2 * (2 * q + v), 2 * (2 * q + v))
        yield from core_operations(work, self.num_heads, self.head_dim, self.value_head_dim, self.dropout)
        yield elementwise("context together", "core", 2 * v, 2 * v)
        yield self.out_proj.operation("output projection", "attention", work)

    def tape(self, work: Work, writes: str, reads: str, *, recompute_core: bool = False) -> list[Step]:
        q, v = self._bytes(work)
        steps = [*self._up_steps(work, reads), *self._heads(work, keeps_queries=recompute_core)]
        sizes = CoreSizes(self.num_heads, q, q, v, v, self.dropout, self.softmax_in_fp32)
        steps += sizes.tape(work, steps[-1].size, recompute=recompute_core)
        return [*steps, *self.out_proj.tape(work, writes, steps[-1].writes)]

    def _up_steps(self, work: Work, reads: str) -> list[Step]:
        steps, source = [], reads
        if self.q_down is not None:
            steps += self.q_down.tape(work, "queries down", reads)
            steps += self.q_norm.tape(work, "queries normed", "queries down")
            source = "queries normed"
        steps += self.q_up.tape(work, "queries", source)
        steps += self.kv_down.tape(work, "keys and values down", reads)
        steps.append(Step("compressed", work.split_bytes_of(self.kv_rank), ("keys and values down",)))
        steps += self.kv_norm.tape(work, "compressed normed", "compressed")
        return [*steps, *self.kv_up.tape(work, "keys and values", "compressed normed")]

    def _heads(self, work: Work, *, keeps_queries: bool) -> list[Step]:
        q, v = self._bytes(work)
        turning = q * self.rope_head_dim / self.head_dim
        wide = turning * 4 / work.activation_bytes
        kept = q * (keeps_queries or work.flash) + q + v
        steps = [Step("query", q, ("queries",), extra=3 * wide, scratch=q + 2 * wide, backward_scratch=q)]
        if work.sep > 1:
            whole = 2 * q + v
            steps.append(
                Step(
                    "heads",
                    kept,
                    ("query", "keys and values"),
                    scratch=3 * whole - kept,
                    backward_scratch=2 * whole,
                )
            )
            return steps
        return [
            *steps,
            Step("heads", kept, ("query", "keys and values"), scratch=q + v, backward_scratch=q + v),
        ]
