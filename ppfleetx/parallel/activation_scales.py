"""Input scales of fake-quantised linears, updated once a step from the global batch."""

from __future__ import annotations

import paddle

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.fake_quant import quantizers_of

# Ranks along these axes hold parts of the same linears' inputs, or inputs of other tokens.
_AXES = ("mp", "sep", "dp", "sharding")


class ActivationScales:
    def __init__(self, model: paddle.nn.Layer, ctx: ParallelContext) -> None:
        self._ctx, self._quantizers = ctx, quantizers_of(model)
        self._moving = [one for one in self._quantizers if one.follows and one.input_scale is not None]

    def begin(self) -> None:
        for quantizer in self._quantizers:
            quantizer.begin()

    @paddle.no_grad()
    def update(self) -> None:
        """Move each scale towards the largest magnitude in the global batch; call this after a step."""
        if not self._moving:
            return
        largest = paddle.stack([quantizer.take_largest() for quantizer in self._moving])
        self._ctx.max_tensor_over(_AXES, largest)
        for quantizer, value in zip(self._moving, largest.unbind(0), strict=True):
            quantizer.follow(value)
