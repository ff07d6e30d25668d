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
    """Interface of rotary embeddings, which rotate queries and keys so that scores depend on distances."""

    def rotate(self, x: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """Rotate ``x [b, groups, heads, s, head_dim]`` by the positions ``[b, s]``."""


@dataclass(frozen=True)
class Positions:
    """The parts of a position embedding. With the default values, the model has no position embedding.

    Attributes:
        table_rows: number of rows of a learned table that is added to the word embeddings; None: no table.
        offset: row of the table for position 0.
        added: a function of ``position_ids [s, b]`` that returns vectors ``[s, b, h]`` to add to the word
            embeddings.
        rotary: rotates queries and keys in every block.
        local_rotary: replaces ``rotary`` in blocks with an attention window; None: no replacement.
        biases: whether blocks add linear biases to the scores (ALiBi).
        switch_length: largest length of a sequence that uses the first of LongRoPE's two sets of angles;
            None: there is only one set.
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
    """Return the parts of a model without position embedding. Only the causal mask makes attention depend on
    the order of tokens."""
    return Positions()
