"""Activations and the MLP (feed-forward) layer."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import paddle.nn.functional as F
from paddle import _C_ops, nn

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import ACTIVATIONS
from ppfleetx.distributed.device import lacks_kernel
from ppfleetx.nn.cpu_ops import ops
from ppfleetx.nn.mlp_spec import MLPSpec
from ppfleetx.nn.stage import LayerFactory

_PROBE_WIDTH = 8  # width of the tensor that checks an activation's output shape


def gelu_tanh(x: paddle.Tensor) -> paddle.Tensor:
    """Apply GELU with the tanh approximation (Hendrycks and Gimpel, 2016), elementwise."""
    # Passes without gradients also use the CPU operator, because recomputation must give the same bits.
    on_cpu = paddle.in_dynamic_mode() and x.place.is_cpu_place()
    if on_cpu and x.dtype == paddle.float32 and ops.are_available():
        return ops.gelu_tanh(x)
    return F.gelu(x, approximate=True)


def quick_gelu(x: paddle.Tensor) -> paddle.Tensor:
    """Return ``x * sigmoid(1.702 x)``, elementwise."""
    return x * F.sigmoid(1.702 * x)  # Hendrycks and Gimpel 2016, section 2


def relu(x: paddle.Tensor) -> paddle.Tensor:
    if lacks_kernel("relu", x):
        return F.relu(x.astype("float32")).astype(x.dtype)
    return F.relu(x)


def relu_squared(x: paddle.Tensor) -> paddle.Tensor:
    """Return the square of the ReLU (So et al., 2021), elementwise."""
    return relu(x).square()


def _gated(
    x: paddle.Tensor, combine: Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]
) -> paddle.Tensor:
    """Return ``combine(gate, up)`` for ``x [s, b, 2 * ffn]``, whose last dimension alternates gate and up."""
    s, b, width = x.shape
    # One transpose separates the pairs; strided slices are ten times slower on a CPU.
    gate, up = x.reshape([-1, 2]).transpose([1, 0]).unbind(0)
    return combine(gate, up).reshape([s, b, width // 2])


def swiglu(x: paddle.Tensor) -> paddle.Tensor:
    """Return silu(gate) * up for ``x [s, b, 2 * ffn]``, whose last dimension alternates gate and up."""
    return _gated(x, lambda gate, up: F.silu(gate) * up)


def geglu_tanh(x: paddle.Tensor) -> paddle.Tensor:
    """Return gelu(gate) * up (Shazeer, 2020) with the tanh form of GELU. The last dimension of ``x``
    alternates gate and up."""
    return _gated(x, lambda gate, up: gelu_tanh(gate) * up)


def fused_swiglu(x: paddle.Tensor) -> paddle.Tensor:
    """Return silu(gate) * up, computed by one fused kernel after a copy that separates gate and up. The last
    dimension of ``x [s, b, 2 * ffn]`` alternates gate and up."""
    return _gated(x, _C_ops.swiglu)


class Activation:
    """The activation registered as ``name``, in its fused form if available.

    Raises:
        ConfigError: the activation does not return the width that its registration requires.
    """

    def __init__(self, factory: LayerFactory, name: str) -> None:
        self.function, self._fused = _checked_activation(name), factory.fused

    def __call__(self, inner: paddle.Tensor) -> paddle.Tensor:
        """Apply the activation to ``inner [s, b, width]``. A gated activation halves the width."""
        if self.function is swiglu and self._fused.takes("swiglu", inner):
            return fused_swiglu(inner)
        return self.function(inner)


class MLP(nn.Layer):
    """An MLP, ``fc2(activation(fc1(x)))``, on ``[s, b, h]``."""

    def __init__(self, factory: LayerFactory, spec: MLPSpec) -> None:
        super().__init__()
        factory.local_count(spec.ffn_hidden_size, "feed-forward units")
        self.activation = Activation(factory, spec.activation)
        self.fc1, self.fc2 = factory.linear(spec.fc1), factory.linear(spec.fc2)

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return self.fc2(self.activation(self.fc1(hidden)))


def _checked_activation(name: str) -> Callable[[paddle.Tensor], paddle.Tensor]:
    """Return the activation registered as ``name``, after checking its output width on a small tensor."""
    # Without the check, a matrix product would fail with a message that does not mention activations.
    with paddle.no_grad():
        given = ACTIVATIONS.make(name, paddle.zeros([1, 1, _PROBE_WIDTH]), gives=paddle.Tensor)
    gated, width = ACTIVATIONS.traits(name).gated, given.shape[-1]
    if list(given.shape[:-1]) == [1, 1] and width == (_PROBE_WIDTH // 2 if gated else _PROBE_WIDTH):
        return ACTIVATIONS.load(name)
    rule = (
        "was registered with ActivationTraits(gated=True), and must return half the width that it is given"
        if gated
        else "must return the shape that it is given; one with a gate, which returns half the width, "
        "is registered with traits=ActivationTraits(gated=True)"
    )
    raise ConfigError(
        f"{rule}. It was given [1, 1, {_PROBE_WIDTH}] and returned {list(given.shape)}",
        key="Model.hidden_act",
        value=name,
    )
