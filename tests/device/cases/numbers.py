"""In a rank: single operators on the device, against the CPU's float32 kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from ppfleetx.config.registries import ACTIVATIONS, NORMS
from ppfleetx.distributed.device import allow_tf32, has_kernels
from ppfleetx.nn.attention_kernels import KernelOptions, reference_attention
from ppfleetx.nn.layers import Linear
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.positions import RotaryEmbedding
from tests.device.test_numbers import OPERATORS

S, B, H, V = 24, 3, 64, 96


@dataclass(frozen=True)
class Operator:
    """What is compared.

    Attributes:
        call: takes the tensors by name, and gives one tensor.
        shapes: of the inputs that have gradients.
        integers: name -> shape and bound of the others.
        layer: makes the layer that is called with the inputs in place of ``call``; its parameters get
            values, and their gradients are compared too.
    """

    shapes: dict[str, tuple[int, ...]]
    call: Callable[..., paddle.Tensor] | None = None
    integers: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    layer: Callable[[], paddle.nn.Layer] | None = None


def _attention(query: Any, key: Any, value: Any) -> paddle.Tensor:
    nothing_dropped = paddle.nn.Dropout(0.0)
    return reference_attention(query, key, value, None, nothing_dropped, KernelOptions("reference"))


def _loss(logits: Any, labels: Any) -> paddle.Tensor:
    mask = (labels % 3 > 0).astype("float32")
    return token_loss(logits, labels, mask, V - 6).loss


HEADS = {"query": (B, 4, 2, S, 16), "key": (B, 4, S, 16), "value": (B, 4, S, 16)}


def operators() -> dict[str, Operator]:
    """All of them, by name."""
    trunk = {"x": (S, B, H)}
    found = {
        "linear": Operator(trunk, layer=lambda: Linear(H, 2 * H, bias=True)),
        "linear without bias": Operator(trunk, layer=lambda: Linear(H, 2 * H, bias=False)),
        "embedding": Operator(
            {"table": (V, H)}, lambda table, ids: F.embedding(ids, table), {"ids": ((B, S), V)}
        ),
        "rope": Operator(
            {"x": (B, 4, 2, S, 16)},
            lambda x, positions: RotaryEmbedding(16, 64, 10000.0).rotate(x, positions),
            {"positions": ((B, S), 64)},
        ),
        "attention": Operator(HEADS, _attention),
        "loss": Operator({"logits": (S, B, V)}, _loss, {"labels": ((B, S), V - 6)}),
    }
    for name in NORMS.names():
        found[f"norm {name}"] = Operator(trunk, layer=lambda name=name: NORMS.make(name, H, 1e-5))
    for name in ACTIVATIONS.names():
        found[f"activation {name}"] = Operator(trunk, ACTIVATIONS.load(name))
    assert tuple(found) == OPERATORS
    return found


def computes(device: str, dtype: str) -> bool:
    """Whether the card computes in ``dtype``."""
    paddle.set_device(device)
    return has_kernels(dtype)


@contextlib.contextmanager
def on(device: str, dtype: str) -> Iterator[None]:
    """Within, Paddle computes on ``device`` without TF32; a CPU emulates 16 bits."""
    from tests.helpers.low_precision import emulated

    before = paddle.get_device()
    paddle.set_device(device)
    allow_tf32(False)
    emulates = device == "cpu" and dtype != "float32"
    try:
        with emulated() if emulates else contextlib.nullcontext():
            yield
    finally:
        paddle.set_device(before)


def compare(name: str, dtype: str, device: str, noncontiguous: bool = False) -> dict[str, float]:
    """Largest difference of the result and of each gradient from the CPU's float32 kernels on the same
    (rounded) numbers, relative to the largest element.

    Args:
        noncontiguous: the inputs are transposed views.
    """
    found = []
    for where, kind in ((device, dtype), ("cpu", "float32")):
        with on(where, kind):
            found.append(run(operators()[name], kind, rounded_to=dtype, strided=noncontiguous))
    return {key: apart(found[0][key], found[1][key]) for key in found[1]}


def apart(value: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest element that is expected."""
    assert value.shape == expected.shape
    assert np.isfinite(value).all(), "not finite"
    return float(np.abs(value - expected).max() / max(np.abs(expected).max(), 1e-30))


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers that ``dtype`` holds exactly."""
    array = array.astype(np.float32)
    if dtype == "float16":
        return array.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # to nearest, ties to even
        bits = array.view(np.uint32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return array


def run(
    operator: Operator, dtype: str, *, rounded_to: str, strided: bool = False, trains: bool = True
) -> dict[str, np.ndarray]:
    """The result in ``dtype`` on numbers that ``rounded_to`` holds, and the gradients, unless it does not
    train."""
    draw = np.random.default_rng(7)

    def tensor(array: np.ndarray) -> paddle.Tensor:
        array = rounded(array, rounded_to)
        if strided and array.ndim > 1:
            view = paddle.to_tensor(np.ascontiguousarray(array.swapaxes(0, 1))).astype(dtype)
            return view.transpose([1, 0, *range(2, array.ndim)])
        return paddle.to_tensor(array).astype(dtype)

    inputs = {name: tensor(draw.standard_normal(shape)) for name, shape in operator.shapes.items()}
    for one in inputs.values():
        one.stop_gradient = not trains
        if trains:
            one.retain_grads()
    indices = {
        name: paddle.to_tensor(draw.integers(0, bound, shape))
        for name, (shape, bound) in operator.integers.items()
    }
    call, parameters = operator.call, {}
    if operator.layer is not None:
        call = operator.layer()
        parameters = dict(call.named_parameters())
        for parameter in parameters.values():
            parameter.set_value(rounded(draw.standard_normal(parameter.shape), rounded_to))
        for parameter in parameters.values():  # `Layer.astype` leaves them as they are on plugins' devices
            low = parameter.detach().astype(dtype)
            parameter.value().get_tensor()._share_data_with(low.value().get_tensor())
    output = call(*inputs.values(), *indices.values())
    if not trains:
        return {"result": number(output)}
    upstream = rounded(np.asarray(draw.standard_normal(output.shape)), rounded_to)
    output.backward(paddle.to_tensor(upstream).astype(output.dtype))
    gradients = {f"d {name}": one.grad for name, one in (inputs | parameters).items()}
    return {name: number(one) for name, one in {"result": output, **gradients}.items()}


def number(tensor: paddle.Tensor) -> np.ndarray:
    """As float64."""
    return tensor.astype("float32").numpy().astype(np.float64)


def where_it_runs() -> tuple[str, bool]:
    """The device, and whether tensors may be views with strides, as on a GPU."""
    return paddle.get_device(), paddle.get_flags("FLAGS_use_stride_kernel")["FLAGS_use_stride_kernel"]
