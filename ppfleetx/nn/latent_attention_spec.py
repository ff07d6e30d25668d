"""Declaration of multi-head latent attention: sizes, parameters and cost. No Paddle.

Letters: q, k, v bytes of all queries, keys and values on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ppfleetx.nn.attention_spec import CoreSizes, core_operations, parts_of
from ppfleetx.nn.cost import Operation, Work, elementwise
from ppfleetx.nn.init import Init
from ppfleetx.nn.layer_spec import LinearSpec, NormSpec, Specs, parameters_within
from ppfleetx.nn.tape import Step


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Causal self-attention whose keys and values are made from one compressed vector per position
    (DeepSeek-AI, "DeepSeek-V2", 2024).

    Attributes:
        layer: the layer's class; a subclass may name its own.
        hidden_size: width of the hidden states, h.
        num_heads: heads of queries, keys and values.
        q_rank: width of the compressed queries; None: queries are made from the hidden states.
        kv_rank: width of the compressed keys and values.
        rope_head_dim: features of a head's query and key with rotary positions; all heads share these
            features of the key.
        nope_head_dim: features of a head's query and key without positions.
        value_head_dim: width of a head's value.
        norm: kind and epsilon of the norms of compressed vectors.
        down_bias: whether the projections to compressed vectors have a bias.
        output_bias: whether the projection after attention has one.
        init: initial values of all projections but the last.
        output_init: initial values of the projection after attention.
        dropout: share of attention weights dropped.
        window: how many earlier positions a token sees; None: all of them.
        score_factor: factor of the scores, in addition to ``1 / sqrt(head_dim)``.
        softmax_in_fp32: whether the softmax is in float32 under mixed precision.
    """

    layer: ClassVar[str | Callable[..., Any]] = "ppfleetx.nn.latent_attention:LatentAttention"

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
    def score_width(self) -> int:
        """Features multiplied for one score: the width of all queries plus the width of all values."""
        return self.num_heads * (self.head_dim + self.value_head_dim)

    @property
    def q_down(self) -> LinearSpec | None:
        return None if self.q_rank is None else self._down(self.q_rank)

    @property
    def q_norm(self) -> NormSpec | None:
        return None if self.q_rank is None else NormSpec(self.norm[0], self.q_rank, self.norm[1])

    @property
    def q_up(self) -> LinearSpec:
        """The projection of compressed queries to heads, ``[head][nope_head_dim, rope_head_dim]``."""
        width_in = self.hidden_size if self.q_rank is None else self.q_rank
        return self._up(width_in, {"q": self.head_dim})

    @property
    def kv_down(self) -> LinearSpec:
        """The projection of hidden states to compressed keys and values and the rotary part of the key."""
        return self._down(self.kv_rank + self.rope_head_dim)

    @property
    def kv_norm(self) -> NormSpec:
        return NormSpec(self.norm[0], self.kv_rank, self.norm[1])

    @property
    def kv_up(self) -> LinearSpec:
        """The projection of compressed vectors to heads, ``[head][nope_head_dim, value_head_dim]``."""
        return self._up(self.kv_rank, {"k": self.nope_head_dim, "v": self.value_head_dim})

    @property
    def out_proj(self) -> LinearSpec:
        width = self.num_heads * self.value_head_dim
        return LinearSpec(width, self.hidden_size, "rows", self.output_bias, self.output_init)

    def _down(self, width: int) -> LinearSpec:
        """A projection to a compressed vector. All heads share the vector, so every tensor-parallel rank
        computes all of it."""
        return LinearSpec(self.hidden_size, width, "whole", self.down_bias, self.init, of_trunk=True)

    def _up(self, width_in: int, widths: dict[str, int]) -> LinearSpec:
        parts, period = parts_of(widths), sum(widths.values())
        width = self.num_heads * period
        return LinearSpec(width_in, width, "columns", bias=False, init=self.init, parts=parts)

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        names = ("q_down", "q_norm", "q_up", "kv_down", "kv_norm", "kv_up", "out_proj")
        layers = ((name, getattr(self, name)) for name in names)
        return parameters_within(layers, sequence_parallel=sequence_parallel)

    def exchanged_bytes(self, work: Work) -> tuple[float, float]:
        """Bytes a context-parallel rank exchanges before attention and after it."""
        q, v = self._bytes(work)
        return 2 * q + v, v

    def _bytes(self, work: Work) -> tuple[float, float]:
        """Bytes of all queries (or keys) and of all values on one rank."""
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
        """Steps of a forward pass; with ``recompute_core`` it does not keep scores and weights."""
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
        steps.append(Step("compressed", work.part_of(self.kv_rank), ("keys and values down",)))
        steps += self.kv_norm.tape(work, "compressed normed", "compressed")
        return [*steps, *self.kv_up.tape(work, "keys and values", "compressed normed")]

    def _heads(self, work: Work, *, keeps_queries: bool) -> list[Step]:
        q, v = self._bytes(work)
        turning = q * self.rope_head_dim / self.head_dim
        wide = turning * 4 / work.activation_bytes
        kept = q * (keeps_queries or work.flash) + q + v
        steps = [Step("query", q, ("queries",), extra=3 * wide, scratch=q + 2 * wide, back=q)]
        if work.sep > 1:
            whole = 2 * q + v
            steps.append(
                Step("heads", kept, ("query", "keys and values"), scratch=3 * whole - kept, back=2 * whole)
            )
            return steps
        return [*steps, Step("heads", kept, ("query", "keys and values"), scratch=q + v, back=q + v)]
