"""Small trials that compare each fused operator with plain operators, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from ppfleetx.nn import attention_kernels, mlp, norm
from ppfleetx.nn.attention_kernels import KernelOptions
from ppfleetx.nn.flash import flash_attention, packed_flash_attention
from ppfleetx.nn.fused_ops import FusedOps
from ppfleetx.nn.fused_trial_process import Pairs
from ppfleetx.nn.matmul import Matmul
from ppfleetx.nn.positions import RotaryEmbedding

Function = Callable[..., paddle.Tensor]


def rms_norm(dtype: str) -> Pairs:
    """Compare fused RMSNorm with plain operators, for a width that is not a power of two."""
    yield from _both(
        lambda x, gain: norm.fused_rms_norm(x, gain, 1e-5),
        lambda x, gain: norm.rms_norm(x, gain, 1e-5),
        _random(dtype, [3, 4, 96], [96]),
    )


def rope(dtype: str) -> Pairs:
    """Compare the fused rotary embedding with plain operators, for non-consecutive positions and several
    groups of heads."""
    rotaries = RotaryEmbedding(64, 32, 100.0), RotaryEmbedding(64, 32, 100.0)
    rotaries[0].fused = FusedOps({"rope": [dtype]})
    positions = paddle.to_tensor((np.arange(10).reshape([2, 5]) * 7) % 32)
    fused, plain = (lambda x, rotary=rotary: rotary.rotate(x, positions) for rotary in rotaries)
    yield from _both(fused, plain, _random(dtype, [2, 3, 2, 5, 64]))


def swiglu(dtype: str) -> Pairs:
    """Compare fused SwiGLU with plain operators."""
    yield from _both(mlp.fused_swiglu, mlp.swiglu, _random(dtype, [3, 2, 48]))


def causal_softmax(dtype: str) -> Pairs:
    """Compare attention that uses the fused causal softmax with the reference attention, for grouped-query
    attention."""
    inputs = _random(dtype, [2, 2, 3, 32, 16], [2, 2, 32, 16], [2, 2, 32, 16])
    fused = KernelOptions(fused=FusedOps({"causal_softmax": ["float32", dtype]}))
    yield from _both(partial(_reference, options=fused), _reference, inputs)


def packed_attention(dtype: str) -> Pairs:
    """Compare flash attention of packed queries, keys and values with the reference attention."""

    def reference(qkv: paddle.Tensor) -> paddle.Tensor:
        query, key, value = qkv.transpose([3, 1, 2, 0, 4]).unbind(0)
        return _reference(query.unsqueeze(2), key, value).transpose([3, 0, 1, 2, 4]).flatten(2)

    packed = partial(packed_flash_attention, dropout=_no_dropout())
    yield from _both(packed, reference, _random(dtype, [32, 2, 2, 3, 64]))


def plugin_attention(dtype: str) -> Pairs:
    """Compare a plugin's attention operator with the reference attention, with one document per row and with
    two."""
    inputs = _random(dtype, [2, 2, 3, 32, 64], [2, 2, 32, 64], [2, 2, 32, 64])
    starts = paddle.to_tensor(np.array([[0] * 20 + [20] * 12, [0] * 7 + [7] * 25], np.int32))
    for start in (None, starts):
        plugin = partial(flash_attention, document_start=start, dropout=_no_dropout())
        yield from _both(plugin, partial(_reference, start=start), inputs)


def linear_grad_add(dtype: str) -> Pairs:
    """Compare the fused kernel that accumulates weight gradients with plain operators. Two matmuls use the
    same weight."""
    weight, bias, *inputs = _random(dtype, [16, 24], [24], [3, 2, 16], [5, 16])
    sums, gradients = [], []
    for matmul in (Matmul(fused=FusedOps({"linear_grad_add": [dtype]})), Matmul()):
        matrix, vector, *leaves = (_leaf(tensor) for tensor in (weight, bias, *inputs))
        with paddle.enable_grad():
            for leaf in leaves:
                matmul.linear(leaf, matrix, vector).square().sum().backward()
        main = getattr(matrix, "main_grad", None)
        sums.append(matrix.grad.astype("float32") if main is None else main)
        gradients.append([vector.grad, *(leaf.grad for leaf in leaves)])
    yield sums[0], sums[1]
    yield from zip(*gradients, strict=True)


def weight_cast(dtype: str) -> Pairs:
    """Compare two matmuls that share a 16-bit copy of a weight with two matmuls that each cast the weight
    themselves."""
    weight, *inputs = _random("float32", [16, 24], [3, 16], [5, 16])
    kept = Matmul(cast_to=dtype)
    rows = [x.astype(dtype) for x in inputs]
    one, other = EagerParamBase.from_tensor(weight), _leaf(weight)
    with paddle.enable_grad(), kept.kept():
        for x in rows:
            kept.linear(x, one).sum().backward()
            Matmul().linear(x, other.astype(dtype)).sum().backward()
    yield one.grad, other.grad


def _leaf(tensor: paddle.Tensor) -> paddle.Tensor:
    leaf = tensor.detach().clone()
    leaf.stop_gradient = False
    return leaf


def _no_dropout() -> nn.Layer:
    dropout = nn.Dropout(0.0)
    dropout.train()
    return dropout


def _reference(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    start: paddle.Tensor | None = None,
    options: KernelOptions | None = None,
) -> paddle.Tensor:
    options = options or KernelOptions()
    return attention_kernels.reference_attention(query, key, value, start, _no_dropout(), options)


def _both(fused: Function, plain: Function, inputs: list[paddle.Tensor]) -> Pairs:
    results = [_with_gradients(function, inputs) for function in (fused, plain)]
    yield from zip(*results, strict=True)


def _with_gradients(function: Function, inputs: list[paddle.Tensor]) -> list[paddle.Tensor]:
    leaves = [_leaf(value) for value in inputs]
    with paddle.enable_grad():
        result = function(*leaves)
        (upstream,) = _random(str(result.dtype).removeprefix("paddle."), result.shape)
        result.backward(upstream)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def _random(dtype: str, *shapes: list[int]) -> list[paddle.Tensor]:
    """Return normal random tensors without advancing Paddle's generators."""
    generator = np.random.default_rng(0)
    arrays = (generator.standard_normal(shape).astype(np.float32) for shape in shapes)
    return [paddle.to_tensor(array).astype(dtype) for array in arrays]
