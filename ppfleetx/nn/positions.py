"""Position embeddings: added to the hidden states, or applied to queries and keys in attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import paddle

from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import RopeScalingConfig
from ppfleetx.nn.rope import RotaryEmbedding


class Rotary(Protocol):
    """Rotates queries and keys by their positions, so that scores depend on distances."""

    def rotate(self, x: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """Rotate ``x [b, groups, heads, s, head_dim]`` by the positions ``[b, s]``; the shape stays."""


@dataclass(frozen=True)
class Positions:
    """The parts of a position embedding. If all are None, the model has no position embedding.

    Attributes:
        table_rows: rows of a learned table that is added to the embeddings.
        offset: the table's row for position 0.
        added: a function of ``position_ids [s, b]`` that returns vectors to add to the embeddings,
            ``[s, b, h]``.
        rotary: rotates queries and keys in every block.
        local_rotary: rotates them in layers with a window; None: ``rotary`` does.
        biases: whether blocks add linear biases to the scores.
        switch_length: the longest sequence that ``rotary`` rotates by its first set of angles (LongRoPE);
            None: it has one set.
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


# -- the built-in ones, made from the ``Model`` section


def learned_absolute(cfg: ModelConfig) -> Positions:
    """A learned vector for each position (Radford et al., 2018)."""
    rows = cfg.max_position_embeddings + cfg.position_offset
    return Positions(table_rows=rows, offset=cfg.position_offset)


def rope(cfg: ModelConfig) -> Positions:
    """Rotary positions (Su et al., 2021), stretched according to ``Model.rope_scaling``."""

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
    """Linear biases: scores fall linearly with the distance (Press et al., 2022)."""
    return Positions(biases=True)


def none(cfg: ModelConfig) -> Positions:
    """No positions: attention sees the order only through its causal mask."""
    return Positions()
