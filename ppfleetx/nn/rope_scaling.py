"""Frequencies of the rotary position embedding in float64, optionally scaled to longer sequences. This module
uses only NumPy."""

from __future__ import annotations

import math

import numpy as np

from ppfleetx.config.sections.rope import RopeScalingConfig


def inverse_frequencies(
    head_dim: int, base: float, scaling: RopeScalingConfig | None, *, is_long: bool = False
) -> np.ndarray:
    """Return the frequency of each pair of features, ``[head_dim / 2]``: the angle in radians by which the
    pair is rotated per position.

    Args:
        scaling: how frequencies are scaled; None: they are not scaled.
        is_long: whether to return LongRoPE's frequencies for long sequences.
    """
    plain = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain
    if scaling.type == "longrope":
        return plain / np.array(scaling.long_factor if is_long else scaling.short_factor)
    return plain * (1 - (1 - 1 / scaling.factor) * _stretched_share(plain, base, scaling))


def attention_factor(scaling: RopeScalingConfig | None) -> float:
    """Return the factor by which YaRN (Peng et al., 2023) and LongRoPE (Ding et al., 2024) multiply cos and
    sin; 1 for other methods."""
    if scaling is None or scaling.type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.type == "longrope":
        return longrope_attention_factor(scaling.factor, scaling.original_max_position_embeddings)

    # As in Hugging Face transformers, mscale and mscale_all_dim apply only if neither is 0.
    if scaling.mscale and scaling.mscale_all_dim:
        return _magnitude(scaling, scaling.mscale) / _magnitude(scaling, scaling.mscale_all_dim)
    return _magnitude(scaling, 1.0)


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """Return the factor by which LongRoPE multiplies cos and sin by default, if it extends the context from
    ``original_length`` to ``factor * original_length``."""
    return math.sqrt(1 + math.log(factor) / math.log(original_length))


def score_factor(scaling: RopeScalingConfig | None) -> float:
    """Return the factor by which DeepSeek's latent attention multiplies the scores if rotary frequencies are
    scaled. It applies in addition to the factor of cos and sin (:func:`attention_factor`)."""
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return _magnitude(scaling, scaling.mscale_all_dim) ** 2


def _magnitude(scaling: RopeScalingConfig, weight: float) -> float:
    return 0.1 * weight * math.log(scaling.factor) + 1.0


def _stretched_share(plain: np.ndarray, base: float, scaling: RopeScalingConfig) -> np.ndarray | float:
    """Return how strongly each frequency is scaled: from 0 (unchanged) to 1 (divided by the full factor)."""
    if scaling.type == "linear":
        return 1.0
    if scaling.type == "llama3":
        # full rotations over a sequence of the original length
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return 1 - np.clip((turns - low) / (high - low), 0, 1)
    first, last = _yarn_bounds(2 * len(plain), base, scaling)
    return np.clip((np.arange(len(plain)) - first) / (last - first), 0, 1)


def _yarn_bounds(head_dim: int, base: float, scaling: RopeScalingConfig) -> tuple[float, float]:
    """Return the two frequency indices between which YaRN interpolates. YaRN keeps the frequencies at lower
    indices, and divides the frequencies at higher indices by the full factor."""

    def index_of(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else last + 0.001
