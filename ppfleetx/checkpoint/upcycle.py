"""Make a mixture of experts from a dense model: each expert is a copy of the MLP (Komatsuzaki et al.,
2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor, cast
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.spec import parameter_specs
from ppfleetx.nn.init import Constant, Normal, draw
from ppfleetx.nn.param_spec import ParamSpec

_EXPERTS, _MLP = ".mlp.experts.", ".mlp."


def upcycled(
    dense: Mapping[str, LazyTensor], model: ModelConfig, *, seed: int, noise: float = 0.0
) -> dict[str, LazyTensor]:
    """The parameters of a mixture of experts, in model order, read one at a time.

    Args:
        dense: all parameters of the model whose ``moe`` is null, by canonical name.
        model: the mixture's configuration. Its experts have the width of the MLP.
        seed: the seed of the routers' initial values and of the noise.
        noise: the standard deviation of the noise added to each expert's matrices, relative to the standard
            deviation of the matrix.
    """
    made = {}
    for name, spec in parameter_specs(model).items():
        if name in dense:
            made[name] = dense[name]
        elif _EXPERTS in name:
            made[name] = _copies(dense[name.replace(_EXPERTS, _MLP)], spec, seed, noise)
        else:
            made[name] = LazyTensor("F32", spec.shape, partial(draw, spec.init, seed, name, spec.shape))
    return made


def _copies(tensor: LazyTensor, spec: ParamSpec, seed: int, noise: float) -> LazyTensor:
    def load() -> np.ndarray:
        values = tensor.read()
        if not noise or isinstance(spec.init, Constant):
            return np.broadcast_to(values, spec.shape)
        values = cast(values, tensor.dtype, "F32")
        added = draw(Normal(noise * float(values.std())), seed, f"{spec.name}.noise", spec.shape)
        return cast(values + added, "F32", tensor.dtype)

    return LazyTensor(tensor.dtype, spec.shape, load)
