"""Matrices cut into panels give the products of whole matrices."""

import numpy as np
import paddle
import pytest

from ppfleetx.nn import panel_matmul
from ppfleetx.nn.panel_matmul import InferenceLinear, PanelMatrix


@pytest.mark.parametrize("width", [32, 48, 96, 100, 600])
@pytest.mark.parametrize("shape", [[1], [1, 2], [7, 3], [200, 3]])
@pytest.mark.parametrize("tile", [16, 48])
def test_products(width: int, shape: list[int], tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_matmul, "WIDTH", tile)
    monkeypatch.setattr(panel_matmul.cpu_ops, "are_available", lambda: False)
    weight = paddle.randn([40, width])
    x = paddle.randn([*shape, 40])
    matrix = PanelMatrix(weight)
    result = matrix.linear(x).numpy()
    assert result.shape == (*shape, width)
    exact = x.numpy().astype(np.float64) @ weight.numpy().astype(np.float64)
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5)
    bias = paddle.randn([width])
    np.testing.assert_allclose(matrix.linear(x, bias).numpy(), exact + bias.numpy(), rtol=1e-5, atol=1e-5)
    assert (matrix._panels is None) == (shape in ([1], [200, 3]))


def test_no_copy_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_matmul, "available_fraction", lambda: 0.1)
    matrix = PanelMatrix(paddle.randn([8, 16]))
    assert matrix.linear(paddle.randn([4, 8])).shape == [4, 16]
    assert matrix._panels is None


def test_a_linear_that_has_gradients_keeps_them() -> None:
    linear = InferenceLinear(8, 16, bias=True)
    linear.bias.set_value(paddle.randn([16]))
    linear.weight.set_value(paddle.randn([8, 16]))
    x = paddle.randn([5, 8])
    with_gradients = linear(x)
    with_gradients.sum().backward()
    assert float(linear.weight.grad.abs().sum()) > 0
    with paddle.no_grad():
        np.testing.assert_allclose(linear(x).numpy(), with_gradients.numpy(), rtol=1e-5, atol=1e-6)
