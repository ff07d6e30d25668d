"""Serve several LoRA adapters with one base model. At most one adapter is active at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ppfleetx.config.errors import CheckpointError
from ppfleetx.generation.decoding_session import NextTokenModel
from ppfleetx.nn.layers import GroupedLinear
from ppfleetx.nn.lora import LoraBranch
from ppfleetx.nn.quantized import QuantizedGroupedLinear


class Adapters:
    """Holds named LoRA adapters for one model and applies them on demand (:meth:`using`). Without an active
    adapter, the model computes what the base model computes. Tensor-parallel models are not supported."""

    def __init__(self, model: NextTokenModel) -> None:
        self._model = model
        self._branches: dict[str, list[tuple[nn.Layer, LoraBranch]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._branches)

    def add(self, name: str, tensors: Mapping[str, np.ndarray], *, scale: float) -> None:
        """Add an adapter called ``name``. For each linear layer X that the adapter changes, ``tensors`` has
        the float32 LoRA matrices ``X.lora.a [in, rank]`` and ``X.lora.b [rank, out]``. Their product is
        multiplied by ``scale``. Raises CheckpointError if the adapter has matrices for expert layers, or
        for layers that the model does not have."""
        linears, branches = self._linears(), []
        for place in sorted({key.rpartition(".")[0] for key in tensors}):
            linear_name = place.removesuffix(".lora")
            linear = linears.get(linear_name)
            if linear is None:
                raise CheckpointError(f"adapter {name} has {place}, and the model has no such linear")
            if isinstance(linear, GroupedLinear | QuantizedGroupedLinear):
                raise CheckpointError(
                    f"adapter {name} has {place}: adapters of experts cannot be chosen by request; merge "
                    "them into the weights (ppfleetx merge)"
                )
            a, b = (tensors[f"{place}.{letter}"] for letter in "ab")
            dtype = _dtype_of(linear)
            branch = LoraBranch(a.shape, b.shape, scale=scale, dropout=nn.Identity())
            branch.to(dtype=dtype)
            for parameter, values in ((branch.a, a), (branch.b, b)):
                parameter.set_value(paddle.to_tensor(values).astype(dtype))
            branches.append((linear, branch))
        self._branches[name] = branches

    def _linears(self) -> dict[str, nn.Layer]:
        return {
            parameter.info.name.removesuffix(".weight"): layer
            for layer in self._model.model.sublayers()
            for parameter in layer.parameters(include_sublayers=False)
            if parameter.info.name.endswith(".weight")
        }

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Context manager in which forward passes of the model include the adapter ``name`` (None: no
        adapter)."""
        if name is None:
            yield
            return
        hooks = [
            linear.register_forward_post_hook(partial(_add, branch))
            for linear, branch in self._branches[name]
        ]
        try:
            with self._model.layer_by_layer():
                yield
        finally:
            for hook in hooks:
                hook.remove()


def _dtype_of(linear: nn.Layer) -> Any:
    weight = linear.weight
    return getattr(weight, "compute_dtype", None) or (
        weight.dtype if weight.is_floating_point() else paddle.float32
    )


def _add(
    branch: LoraBranch, _: nn.Layer, inputs: tuple[paddle.Tensor, ...], output: paddle.Tensor
) -> paddle.Tensor:
    return output + branch(*inputs)
