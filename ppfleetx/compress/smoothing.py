"""SmoothQuant (Xiao et al., 2022): outliers of activations moved into the weights that they meet.

A linear reads what a norm writes. Where input feature j of it is divided by s_j in the norm's gain and bias,
and row j of the matrix is multiplied by s_j, the function stays the same; s_j = sqrt(max|x_j| / max|w_j|)
leaves both equally easy to round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import paddle

_NORM_OF = {"attention.qkv": "input_norm", "mlp.fc1": "mlp_norm"}
_SMALLEST = 1e-5


def smooth_block(
    parameters: Mapping[str, paddle.Tensor], largest: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Change the norms and linears of one block in place.

    Args:
        parameters: of the block, by canonical name.
        largest: linear -> largest magnitude ``[k]`` of each of its input features.

    Returns:
        linear -> ``[k]`` what its inputs were divided by.
    """
    factors = {}
    for linear, norm in _pairs(parameters):
        weight = parameters[f"{linear}.weight"]
        of_weight = np.maximum(np.abs(weight.numpy()).max(axis=1), _SMALLEST)
        factor = np.sqrt(np.maximum(largest[linear], _SMALLEST) / of_weight).astype(np.float32)
        weight.set_value(weight.numpy() * factor[:, np.newaxis])
        for name in (f"{norm}.weight", f"{norm}.bias"):
            if name in parameters:
                parameters[name].set_value(parameters[name].numpy() / factor)
        factors[linear] = factor
    return factors


def _pairs(parameters: Mapping[str, paddle.Tensor]) -> Iterator[tuple[str, str]]:
    """(linear, norm before it) where the norm has a gain."""
    for name in list(parameters):
        for linear, norm in _NORM_OF.items():
            block, found, _ = name.rpartition(f".{linear}.weight")
            if found and f"{block}.{norm}.weight" in parameters:
                yield f"{block}.{linear}", f"{block}.{norm}"
