"""Dropout: replicated over ranks, sliced over ranks, and switched off."""

from __future__ import annotations

import paddle
from paddle import nn

from ppfleetx.distributed.device import lacks_kernel
from ppfleetx.distributed.random import sliced_stream


class Dropout(nn.Dropout):
    """Dropout that does nothing in evaluation or at probability 0."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Drop elements of ``x``; return ``x`` itself in evaluation or if ``p`` is 0."""
        if not self.training or self.p == 0:
            return x
        if lacks_kernel("dropout", x):
            return super().forward(x.astype("float32")).astype(x.dtype)
        return super().forward(x)


class NoDropout:
    """A callable that returns its input; used where dropout never applies."""

    p, training = 0.0, False

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        return x


class SlicedDropout(Dropout):
    """Dropout of activations sliced over tensor-parallel ranks, with a different mask on each."""

    stream = staticmethod(sliced_stream)
    """The random stream for kernels that drop elements themselves."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Like :meth:`Dropout.forward`, with this rank's own random stream."""
        if not self.training or self.p == 0:
            return x
        with self.stream():
            return super().forward(x)
