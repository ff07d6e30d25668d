"""Position embeddings: added to the hidden states, or applied to queries and keys in attention.

Rotary position embedding (Su et al., 2021): pair ``i`` of a head's features is rotated by
``position * base ** (-2 i / head_dim)``, or by a scaled frequency (``Model.rope_scaling``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import _C_ops

from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import RopeScalingConfig
from ppfleetx.distributed.device import plugin_operator
from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps
from ppfleetx.nn.rope_scaling import attention_factor, inverse_frequencies


class Rotary(Protocol):
    """Interface of rotary embeddings, which rotate queries and keys so that scores depend on distances."""

    def rotate(self, x: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """Rotate queries or keys ``x [b, groups, heads, s, head_dim]`` by ``position_ids [b, s]``."""


@dataclass(frozen=True)
class Positions:
    """The components of a position embedding. With the default values, the model has no position embedding.

    Attributes:
        table_rows: number of rows of a learned table that is added to the word embeddings; None: no table.
        offset: row of the table for position 0.
        added: a function of ``position_ids [s, b]`` that returns vectors ``[s, b, h]`` to add to the word
            embeddings; None: nothing is added.
        rotary: rotates queries and keys in every block; None: no rotary positions.
        local_rotary: replaces ``rotary`` in blocks with an attention window; None: no replacement.
        biases: whether blocks add linear biases to the scores (ALiBi).
        switch_length: largest sequence length for which LongRoPE uses its angles for short sequences; None:
            one set of angles serves all lengths.
    """

    table_rows: int | None = None
    offset: int = 0
    added: Callable[[paddle.Tensor], paddle.Tensor] | None = None
    rotary: Rotary | None = None
    local_rotary: Rotary | None = None
    biases: bool = False
    switch_length: int | None = None

    @property
    def reach_blocks(self) -> bool:
        return self.rotary is not None or self.biases


# -- the built-in position embeddings


def learned_absolute(cfg: ModelConfig) -> Positions:
    """Return the position embedding that has a learned vector for each position (Radford et al., 2018)."""
    rows = cfg.max_position_embeddings + cfg.position_offset
    return Positions(table_rows=rows, offset=cfg.position_offset)


def rope(cfg: ModelConfig) -> Positions:
    """Return the rotary position embedding (Su et al., 2021), scaled according to ``Model.rope_scaling``."""

    def turning(base: float, scaling: RopeScalingConfig | None) -> RotaryEmbedding:
        return RotaryEmbedding(
            cfg.rotary_size,
            cfg.max_position_embeddings,
            base,
            scaling,
            interleaved=cfg.rotary_interleaved,
        )

    local = None if cfg.local_rotary_base is None else turning(cfg.local_rotary_base, None)
    rotary = turning(cfg.rotary_base, cfg.rope_scaling)
    return Positions(rotary=rotary, local_rotary=local, switch_length=rotary.switch_length)


def alibi(cfg: ModelConfig) -> Positions:
    """Return the position embedding by linear biases (ALiBi, Press et al., 2022): scores decrease linearly
    with the distance."""
    return Positions(biases=True)


def none(cfg: ModelConfig) -> Positions:
    """Return :class:`Positions` without a position embedding. Attention then depends on the order of tokens
    only through the causal mask."""
    return Positions()


# -- rotary position embedding


class RotaryEmbedding:
    """Rotates queries and keys by their positions, with tables of cos and sin.

    Args:
        head_dim: number of features of a head to rotate, which must be even.
        max_positions: number of positions in the tables.
        base: base of the frequencies, 10000 in the paper.
        scaling: how frequencies are scaled; None: they are not scaled.
        interleaved: whether the features of a pair are neighbors; otherwise, feature ``i`` forms a pair with
            feature ``i + head_dim / 2``.

    Attributes:
        switch_length: largest sequence length for which LongRoPE uses its angles for short sequences; None:
            one set of angles serves all lengths. If it is set, ``position_ids`` must be results of
            :func:`rotary_table_rows`.
    """

    fused: FusedOps = NO_FUSED_OPS

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        base: float,
        scaling: RopeScalingConfig | None = None,
        *,
        interleaved: bool = False,
    ) -> None:
        assert head_dim % 2 == 0
        self.head_dim, self.base, self.scaling, self.interleaved = head_dim, base, scaling, interleaved
        self._of_tables = max_positions, head_dim, base, scaling
        self.switch_length = None if scaling is None else scaling.switch_length(max_positions)

    def rotate(self, x: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """Rotate the first ``head_dim`` features of each head of ``x [b, groups, heads, s, features]`` by
        ``position_ids [b, s]``."""
        if x.shape[-1] > self.head_dim:
            turning, still = x.split([self.head_dim, x.shape[-1] - self.head_dim], axis=-1)
            return paddle.concat([self.rotate(turning, position_ids), still], axis=-1)
        if self._is_fused(x):
            return self._rotate_fused(x, position_ids)
        cos, sin = (table.unsqueeze([1, 2]) for table in self.cos_sin(position_ids))
        if paddle.in_dynamic_mode() and x.place.is_cpu_place() and x.dtype == paddle.float32:
            return self._rotate_on_cpu(x, cos, sin)
        wide = x.astype("float32")
        if self.interleaved:
            first, second = wide.reshape([*x.shape[:-1], self.head_dim // 2, 2]).unbind(-1)
            turned = paddle.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
            return turned.flatten(-2).astype(x.dtype)
        first, second = wide.chunk(2, axis=-1)
        turned = paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)

    def _is_fused(self, x: paddle.Tensor) -> bool:
        if self.interleaved or not self.fused.takes("rope", x):
            return False
        return plugin_operator("fused_rope") is None or x.shape[-1] % 64 == 0

    def _rotate_fused(self, x: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """Rotate ``x`` with the fused kernel in float32, because in 16 bits the kernel would round cos and
        sin."""
        b, groups, heads, s, size = x.shape
        rows = x.transpose([0, 3, 1, 2, 4]).reshape([b, s, groups * heads, size]).astype("float32")
        of_plugin = plugin_operator("fused_rope")
        if of_plugin is not None:  # uses the same angles for all sequences, so join the sequences into one
            tables = [
                paddle.concat([t, t], axis=-1).reshape([1, -1, 1, size]) for t in self.cos_sin(position_ids)
            ]
            with paddle.amp.auto_cast(enable=False):
                turned = of_plugin(rows.reshape([1, b * s, groups * heads, size]), *tables)
            return self._as_heads(turned, x)
        cos, sin = _whole_tables(*self._of_tables, paddle.get_device())
        with paddle.amp.auto_cast(enable=False):
            turned = _C_ops.fused_rotary_position_embedding(
                rows,
                None,  # further tensors to rotate
                None,
                sin,
                cos,
                position_ids.astype("int64"),
                False,  # halves are paired, not neighbors
                False,  # batch before positions
                self.base,
            )[0]
        return self._as_heads(turned, x)

    @staticmethod
    def _as_heads(rows: paddle.Tensor, x: paddle.Tensor) -> paddle.Tensor:
        """Convert ``rows`` to the dtype and layout of ``x``: the positions move from before the heads to
        after them."""
        b, groups, heads, s, size = x.shape
        return rows.astype(x.dtype).reshape([b, s, groups, heads, size]).transpose([0, 2, 3, 1, 4])

    def _rotate_on_cpu(self, x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor) -> paddle.Tensor:
        """Rotate ``x`` with the help of a matmul by a signed permutation matrix. On a CPU, this is six times
        as fast as plain operators, with bitwise equal results."""
        if self.interleaved:
            cos, sin = (table.repeat_interleave(2, axis=-1).expand_as(x) for table in (cos, sin))
        else:
            cos, sin = (paddle.concat([table, table], axis=-1).expand_as(x) for table in (cos, sin))
        return x * cos + paddle.matmul(x, _partners(self.head_dim, self.interleaved)) * sin

    def cos_sin(self, position_ids: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return cos and sin of the rotation angles at ``position_ids``, ``[b, s, head_dim / 2]`` float32
        (computed in float64), multiplied by :func:`~ppfleetx.nn.rope_scaling.attention_factor`."""
        if paddle.in_dynamic_mode():
            cos, sin = _tables(*self._of_tables, paddle.get_device())
            return F.embedding(position_ids, cos), F.embedding(position_ids, sin)
        # An exported program computes the angles, because a table would be stored as a large constant.
        assert self.switch_length is None, "refused in exports"
        frequency = paddle.to_tensor(inverse_frequencies(self.head_dim, self.base, self.scaling))
        angles = position_ids.astype("float64").unsqueeze(-1) * frequency
        factor = attention_factor(self.scaling)
        cos, sin = paddle.cos(angles), paddle.sin(angles)
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return cos.astype("float32"), sin.astype("float32")


def rotary_table_rows(
    position_ids: paddle.Tensor, lengths: paddle.Tensor, switch_length: int
) -> paddle.Tensor:
    """Convert ``position_ids [b, s]`` to row indices of LongRoPE's cos and sin tables.

    Args:
        lengths: ``[b or 1, 1]``, length of each sequence.
    """
    # Sequences longer than switch_length use the second part of the tables.
    return position_ids + switch_length * (lengths > switch_length).astype(position_ids.dtype)


@lru_cache(maxsize=4)
def _partners(head_dim: int, interleaved: bool) -> paddle.Tensor:
    """Return the matrix ``[head_dim, head_dim]`` that maps each pair of features ``(first, second)`` to
    ``(-second, first)``."""
    pairs, swap = np.eye(head_dim // 2, dtype=np.float32), np.array([[0, 1], [-1, 0]], dtype=np.float32)
    return paddle.to_tensor(np.kron(pairs, swap) if interleaved else np.kron(swap, pairs))


@lru_cache(maxsize=4)
def _whole_tables(
    max_positions: int, head_dim: int, base: float, scaling: RopeScalingConfig | None, device: str
) -> tuple[paddle.Tensor, ...]:
    """Return cos and sin tables ``[1, rows, 1, head_dim]``: the results of :func:`_tables`, repeated for both
    halves of a head."""
    tables = _tables(max_positions, head_dim, base, scaling, device)
    return tuple(paddle.concat([table, table], axis=-1).unsqueeze([0, 2]) for table in tables)


@lru_cache(maxsize=4)
def _tables(
    max_positions: int, head_dim: int, base: float, scaling: RopeScalingConfig | None, device: str
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the cos and sin tables that all layers share, ``[rows, head_dim / 2]``, with one row per
    position. With LongRoPE, the first ``switch_length`` rows are for short sequences, and the next
    ``max_positions`` rows for long sequences."""
    frequency = inverse_frequencies(head_dim, base, scaling)
    angles = np.arange(max_positions, dtype=np.float64)[:, None] * frequency
    switch_length = None if scaling is None else scaling.switch_length(max_positions)
    if switch_length is not None:
        long = inverse_frequencies(head_dim, base, scaling, is_long=True)
        angles = np.concatenate([angles[:switch_length], np.arange(max_positions)[:, None] * long])
    factor = attention_factor(scaling)
    return (
        paddle.to_tensor((factor * np.cos(angles)).astype(np.float32)),
        paddle.to_tensor((factor * np.sin(angles)).astype(np.float32)),
    )
