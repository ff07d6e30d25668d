"""Section ``Model.latent_attention``: attention with compressed keys and values."""

from __future__ import annotations

from pydantic import model_validator

from ppfleetx.config.fields import PositiveFloat, RuleError, Section, Size


class LatentAttentionConfig(Section):
    """Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024).

    Keys and values of all heads are made from one compressed vector per position; a further part of each key,
    the same in all heads, carries the position. Decoding caches these two vectors alone.
    """

    q_rank: Size | None = None
    """Width of the compressed queries; null: queries are made from the hidden states directly."""
    kv_rank: Size
    """Width of the compressed keys and values."""
    rope_head_dim: Size
    """Features of each head's query and key that rotary positions turn, an even number."""
    nope_head_dim: Size
    """Features of each head's query and key that carry no position."""
    value_head_dim: Size
    """Width of each head's value."""
    norm_epsilon: PositiveFloat = 1e-6
    """Added to the mean square in the norms of compressed vectors. DeepSeek's programs take 1e-6 whatever the
    epsilon of the other norms is."""

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_head_dim + self.rope_head_dim

    @model_validator(mode="after")
    def _check(self) -> LatentAttentionConfig:
        if self.rope_head_dim % 2:
            raise RuleError(("rope_head_dim",), "rotary positions turn pairs of features: must be even")
        return self
