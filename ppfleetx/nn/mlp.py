"""Feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.config.errors import ConfigError
from ppfleetx.nn.init import Init
from ppfleetx.nn.stage import LayerFactory


def _gelu_tanh(x: paddle.Tensor) -> paddle.Tensor:
    return F.gelu(x, approximate=True)


def _gelu_by_sigmoid(x: paddle.Tensor) -> paddle.Tensor:
    return x * F.sigmoid(1.702 * x)  # Hendrycks and Gimpel 2016, section 2


def _relu_squared(x: paddle.Tensor) -> paddle.Tensor:
    return F.relu(x).square()


def _swiglu(x: paddle.Tensor) -> paddle.Tensor:
    """silu(gate) * up of ``[..., 2 * ffn]`` laid out pairwise ``[ffn][gate, up]``."""
    s, b, width = x.shape
    # One transpose that brings the pairs apart: taking every second column is ten times slower on CPU.
    gate, up = x.reshape([-1, 2]).transpose([1, 0]).unbind(0)
    return (F.silu(gate) * up).reshape([s, b, width // 2])


ACTIVATIONS: dict[str, Callable[[paddle.Tensor], paddle.Tensor]] = {
    "gelu": _gelu_tanh,
    "gelu_exact": F.gelu,
    "quick_gelu": _gelu_by_sigmoid,
    "relu": F.relu,
    "relu2": _relu_squared,
    "swiglu": _swiglu,
}


class MLP(nn.Layer):
    """``fc2(activation(fc1(x)))`` on ``[s, b, h]``.

    Args:
        factory: makes the two linears.
        hidden_size: h.
        ffn_hidden_size: inner size; with swiglu fc1 has twice as many outputs, gate and up in pairs, so
            that any slice of its columns that holds whole pairs is a smaller block of the same kind.
        activation: key of :data:`ACTIVATIONS`.
        bias: whether both linears have biases.
        init: initial values of fc1.
        output_init: initial values of fc2.
    """

    def __init__(
        self,
        factory: LayerFactory,
        *,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str,
        bias: bool,
        init: Init,
        output_init: Init,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(
                f"must be one of {', '.join(ACTIVATIONS)}", key="Model.hidden_act", value=activation
            )
        factory.local_count(ffn_hidden_size, "feed-forward units")
        width = ffn_hidden_size * (2 if activation == "swiglu" else 1)
        self.activation = ACTIVATIONS[activation]
        self.fc1 = factory.column_linear(hidden_size, width, init=init, bias=bias)
        self.fc2 = factory.row_linear(ffn_hidden_size, hidden_size, init=output_init, bias=bias)

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """``hidden [s, b, h]`` to the same shape."""
        return self.fc2(self.activation(self.fc1(hidden)))
