"""Scales of quantised linears' inputs: moved once a step, by what the whole job has seen."""

from __future__ import annotations

import paddle

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.fake_quant import quantizers_of

# Ranks of these axes hold parts of, or other tokens in, the inputs of the same linears.
_AXES = ("mp", "sep", "dp", "sharding")


class ActivationScales:
    """The moving averages of a model's fake quantisers.

    Args:
        model: what this rank holds of the model.
        ctx: this process's place.
    """

    def __init__(self, model: paddle.nn.Layer, ctx: ParallelContext) -> None:
        self._ctx, self._quantizers = ctx, quantizers_of(model)
        self._moving = [one for one in self._quantizers if one.follows and one.input_scale is not None]

    def begin(self) -> None:
        """Before a step or an evaluation: forget what passes that came to nothing have seen."""
        for quantizer in self._quantizers:
            quantizer.begin()

    @paddle.no_grad()
    def update(self) -> None:
        """After a step: move each scale by the largest magnitude in the step's global batch."""
        if not self._moving:
            return
        largest = paddle.stack([quantizer.take_largest() for quantizer in self._moving])
        self._ctx.max_tensor_over(_AXES, largest)
        for quantizer, value in zip(self._moving, largest.unbind(0), strict=True):
            quantizer.follow(value)
