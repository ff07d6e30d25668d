"""The position embeddings that ship; each makes :class:`Positions` of the ``Model`` section."""

from __future__ import annotations

from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.nn.positions import Positions
from ppfleetx.nn.rope import RotaryEmbedding


def learned_absolute(cfg: ModelConfig) -> Positions:
    """A learned vector for each position (Radford et al., 2018)."""
    return Positions(table_rows=cfg.max_position_embeddings)


def rope(cfg: ModelConfig) -> Positions:
    """Rotary positions (Su et al., 2021), stretched as ``Model.rope_scaling`` says."""
    rotary = RotaryEmbedding(
        cfg.rotary_size,
        cfg.max_position_embeddings,
        cfg.rotary_base,
        cfg.rope_scaling,
        interleaved=cfg.rotary_interleaved,
    )
    return Positions(rotary=rotary)


def none(cfg: ModelConfig) -> Positions:
    """No positions: attention sees order by its causal mask alone."""
    return Positions()
