"""Weights that were trained with quantisation, stored on the very grid that they were trained on."""

from __future__ import annotations

import numpy as np

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.compress.grids import quantize, scales_of
from ppfleetx.compress.rounding import Stored
from ppfleetx.config.sections.compress import QUANTIZER, Form, QuantizationConfig

_LEAST_SHARE = np.float32(0.01)  # as in training: a learned clip never closes


def on_trained_grid(
    weight: np.ndarray, linear: str, form: Form, cfg: QuantizationConfig, checkpoint: Checkpoint
) -> Stored | None:
    """The linear's weight ``[k, n]`` as training rounded it; None where training did not round it, or to more
    bits than are to be stored.

    Args:
        weight: as trained.
        linear: canonical name.
        form: of what is stored.
        cfg: how it was trained.
        checkpoint: has the learned clip, if there is one.
    """
    kind = "ColumnParallelLinear" if linear.endswith(("qkv", "fc1")) else "RowParallelLinear"
    if not cfg.quantizes(linear, kind) or cfg.weight_bits > form.bits:
        return None
    scale = scales_of(weight, cfg.weight_bits, per_tensor=cfg.weight_quantize_type == "abs_max")
    clip = f"{linear}.{QUANTIZER}.weight_clip"
    if clip in checkpoint.names():
        scale = scale * np.maximum(checkpoint.read(clip).astype(np.float32), _LEAST_SHARE)
    levels = quantize(weight, scale, cfg.weight_bits).astype(np.int8)
    groups = 1 if form.group_size is None else weight.shape[0] // form.group_size
    return Stored(levels, np.broadcast_to(scale, (groups, weight.shape[1])).copy(), form)
