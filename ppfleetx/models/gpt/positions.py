"""The built-in position embeddings, as functions that make :class:`Positions` from the ``Model`` section."""

from __future__ import annotations

from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import RopeScalingConfig
from ppfleetx.nn.positions import Positions
from ppfleetx.nn.rope import RotaryEmbedding


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
