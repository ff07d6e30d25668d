"""Dropout of what all ranks hold alike, of what they hold parts of, and where nothing is dropped."""

from __future__ import annotations

import paddle
from paddle import nn

from ppfleetx.distributed.device import lacks_kernel
from ppfleetx.distributed.random import sliced_stream


class Dropout(nn.Dropout):
    """Dropout that costs nothing where it drops nothing."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """``x`` with elements dropped; ``x`` itself in evaluation and where ``p`` is 0."""
        if not self.training or self.p == 0:
            return x
        if lacks_kernel("dropout", x):
            return super().forward(x.astype("float32")).astype(x.dtype)
        return super().forward(x)


class NoDropout:
    """What is called in the place of dropout where nothing is ever dropped."""

    p, training = 0.0, False

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        return x


class SlicedDropout(Dropout):
    """Dropout of activations that tensor-parallel ranks hold different parts of: their masks differ."""

    stream = staticmethod(sliced_stream)
    """For kernels that drop elements themselves."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """As :meth:`Dropout.forward`, drawn from this rank's own random stream."""
        if not self.training or self.p == 0:
            return x
        with self.stream():
            return super().forward(x)
