"""Rotary frequencies from a Llama's ``config.json``, for the check of converted models.

This is a second reading of the same settings, made from the definition of transformers 5 alone, so that it
repeats no mistake of ``huggingface.rope`` or ``nn.rope_scaling``. Do not replace either by the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppfleetx.config.errors import CheckpointError


def llama_frequencies(config: Mapping[str, Any], width: int) -> tuple[np.ndarray, float]:
    """Angle per position of each pair of a head's features ``[width / 2]``, and what cos and sin are
    multiplied by.

    Raises:
        CheckpointError: settings that the check cannot compute.
    """
    settings = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    top_base = config.get("rope_theta")
    settings.setdefault("rope_theta", 10000.0 if top_base is None else top_base)
    if config.get("original_max_position_embeddings") is not None:
        settings["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    settings.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    kind = settings.get("rope_type", settings.get("type", "default"))
    exponents = np.arange(0, width, 2) / width
    plain = 1.0 / settings["rope_theta"] ** exponents
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / settings["factor"], 1.0
    if kind == "llama3":
        return np.array([_llama3(frequency, settings) for frequency in plain]), 1.0
    if kind == "yarn":
        return _yarn(plain, settings, config.get("max_position_embeddings"))
    raise CheckpointError(f"the check of logits does not know rope scaling {kind!r}")


def _llama3(frequency: float, settings: Mapping[str, Any]) -> float:
    """One frequency of Llama 3.1: by its wavelength kept, divided, or mixed of both."""
    length, factor = settings["original_max_position_embeddings"], settings["factor"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(plain: np.ndarray, settings: Mapping[str, Any], longest: Any) -> tuple[np.ndarray, float]:
    """YaRN by parts: extrapolated frequencies, interpolated ones, and a ramp from the first to the second."""
    width, length, base = 2 * len(plain), settings["original_max_position_embeddings"], settings["rope_theta"]
    factor = longest / length if settings.get("factor") is None else settings["factor"]

    def dimension(rotations: float) -> float:
        return width * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(base))

    start, stop = dimension(settings.get("beta_fast") or 32), dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        start, stop = math.floor(start), math.ceil(stop)
    start, stop = max(start, 0), min(stop, width - 1)
    stop = stop + 0.001 if start == stop else stop
    ramp = np.minimum(np.maximum((np.arange(len(plain)) - start) / (stop - start), 0.0), 1.0)
    magnitude = settings.get("attention_factor")
    if magnitude is None:
        one, all_dims = settings.get("mscale"), settings.get("mscale_all_dim")
        magnitude = (
            _mscale(factor, one) / _mscale(factor, all_dims) if one and all_dims else _mscale(factor, 1)
        )
    return plain / factor * ramp + plain * (1 - ramp), float(magnitude)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
