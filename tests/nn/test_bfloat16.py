"""Products in bfloat16 on a CPU: values, gradients, and machines without them."""

from contextlib import nullcontext

import numpy as np
import paddle
import pytest
from paddle import nn

from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.engine import MixedPrecisionConfig
from ppfleetx.nn.attention_kernels import KernelOptions, attend
from ppfleetx.nn.chunked_loss import ChunkedHead, ChunkTarget
from ppfleetx.nn.cpu_ops import bfloat16, compiled
from ppfleetx.nn.layers import Linear
from ppfleetx.nn.matmul import Matmul
from ppfleetx.parallel import mixed_precision
from ppfleetx.parallel.mixed_precision import Precision
from ppfleetx.utils import device_support

NANO = "ppfleetx/configs/debug/gpt_nano.yaml"
CFG = MixedPrecisionConfig(enable=True, dtype="bfloat16")
needs_operators = pytest.mark.skipif(
    not bfloat16.are_available(), reason="this CPU has no bfloat16 products, or they are not compiled"
)


def rounded(array):
    return paddle.to_tensor(array).astype("bfloat16").astype("float32").numpy().astype(np.float64)


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def heads(groups=1, per_group=1, learns=False):
    """Queries, keys and values of nine positions."""
    shapes = (1, groups, per_group, 9, 8), (1, groups, 9, 8), (1, groups, 9, 8)
    return [paddle.to_tensor(random(*shape), stop_gradient=not learns) for shape in shapes]


@needs_operators
@pytest.mark.parametrize(
    ("x", "y", "turns"),
    [
        ([33, 48], [48, 20], {}),
        ([2, 5, 48], [48, 20], {}),
        ([2, 5, 48], [20, 48], {"transpose_y": True}),
        ([48, 33], [48, 20], {"transpose_x": True}),
        ([2, 3, 7, 16], [2, 3, 9, 16], {"transpose_y": True}),
        ([1, 1], [1, 1], {}),
        ([0, 8], [8, 4], {}),
    ],
)
def test_a_product(x, y, turns):
    """Operands are rounded to bfloat16 and products summed in float32."""
    x, y = random(*x), random(*y)
    left, right = rounded(x), rounded(y)
    left = left.swapaxes(-1, -2) if "transpose_x" in turns else left
    right = right.swapaxes(-1, -2) if "transpose_y" in turns else right
    for low in (False, True):
        operands = [bfloat16.cast(tensor) if low else tensor for tensor in map(paddle.to_tensor, (x, y))]
        result = bfloat16.matmul(*operands, **turns)
        assert result.dtype == paddle.float32
        np.testing.assert_allclose(result.numpy(), left @ right, rtol=1e-6, atol=2e-5)


@needs_operators
def test_casts():
    x = np.concatenate([random(5, 100) * 1e3, [[np.inf, -np.inf, 0.0, 1.00390625] * 25]]).astype(np.float32)
    low, sums = bfloat16.cast_and_sum(paddle.to_tensor(x))
    for cast in (low, bfloat16.cast(paddle.to_tensor(x))):
        np.testing.assert_array_equal(cast.astype("float32").numpy(), rounded(x))
    np.testing.assert_allclose(sums.numpy()[2::4], x.sum(0)[2::4], rtol=1e-5, atol=1e-2)
    assert np.isnan(bfloat16.cast(paddle.to_tensor([np.nan] * 33)).astype("float32").numpy()).all()


@needs_operators
@pytest.mark.parametrize("cast_to", [None, "bfloat16"])
def test_gradients_of_a_linear(cast_to):
    """The operands of all three products are rounded; gradients of weight and bias are float32."""
    layer, matmul = Linear(16, 24, bias=True), Matmul(cast_to=cast_to)
    layer.linear = matmul.linear
    weight, bias, rows, upstream = random(16, 24), random(24), random(2, 3, 16), random(2, 3, 24)
    layer.weight.set_value(weight)
    layer.bias.set_value(bias)
    x = paddle.to_tensor(rows, stop_gradient=False)
    with bfloat16.autocast(), matmul.kept():
        result = layer(x)
        result.backward(paddle.to_tensor(upstream))
    low_x, low_w, low_g = (rounded(array) for array in (rows, weight, upstream))
    flat = low_x.reshape(-1, 16), low_g.reshape(-1, 24)
    expected = [low_x @ low_w + bias, low_g @ low_w.T, flat[0].T @ flat[1], upstream.sum((0, 1))]
    for found, value in zip([result, x.grad, layer.weight.grad, layer.bias.grad], expected, strict=True):
        assert found.dtype == paddle.float32
        np.testing.assert_allclose(found.numpy(), value, rtol=1e-5, atol=1e-5)
    assert matmul.uses["casts"] == (cast_to is not None)


@needs_operators
def test_experts():
    matmul, counts = Matmul(), [3, 0, 2]
    weight = paddle.create_parameter([3, 8, 4], "float32")
    weight.set_value(random(3, 8, 4))
    x = paddle.to_tensor(random(5, 8), stop_gradient=False)
    with bfloat16.autocast():
        result = matmul.grouped(x, weight, None, counts)
        result.sum().backward()
    low_x, low_w = rounded(x.numpy()), rounded(weight.numpy())
    expected = np.concatenate([low_x[:3] @ low_w[0], low_x[3:] @ low_w[2]])
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)
    sums = [low_x[:3].sum(0), np.zeros(8), low_x[3:].sum(0)]
    np.testing.assert_allclose(weight.grad.numpy()[..., 0], sums, rtol=1e-5, atol=1e-5)


@needs_operators
@pytest.mark.parametrize(
    ("heads", "length", "size", "value_size", "packed"),
    [
        ((2, 3, 1), 256, 64, 64, False),
        ((2, 2, 3), 100, 32, 32, True),
        ((1, 2, 2), 700, 24, 16, True),
        ((1, 1, 1), 1, 8, 8, False),
    ],
)
def test_attention(heads, length, size, value_size, packed):
    """Output and gradients are those of the float32 kernel, but for the rounding of operands."""
    batch, groups, _ = heads
    shapes = [(*heads, length, size), (batch, groups, length, size), (batch, groups, length, value_size)]
    start = None
    if packed:
        first = np.sort(np.random.default_rng(0).integers(0, length, (batch, length)), axis=1)
        start = paddle.to_tensor(np.minimum(first, np.arange(length)))
    found = []
    for context in (nullcontext(), bfloat16.autocast()):
        operands = [paddle.to_tensor(random(*shape), stop_gradient=False) for shape in shapes]
        with context:
            result = attend(*operands, start, nn.Dropout(0.0), KernelOptions())
            result.backward(paddle.to_tensor(random(*heads, length, value_size)))
        found.append([tensor.numpy() for tensor in (result, *(operand.grad for operand in operands))])
    for exact, low in zip(*found, strict=True):
        difference = np.linalg.norm(low - exact)
        assert difference < 0.02 * np.linalg.norm(exact) + 1e-6
        assert length == 1 or difference > 1e-5  # it has been rounded


@needs_operators
def test_attention_of_operands_without_gradients():
    query, key, value = heads(per_group=2, learns=True)
    key.stop_gradient = True
    result = bfloat16.attention(query, key, value, None)
    found = paddle.grad(result.sum(), [value, query], retain_graph=True)
    result.sum().backward()
    for gradient, operand in zip(found, (value, query), strict=True):
        np.testing.assert_array_equal(gradient.numpy(), operand.grad.numpy())
    assert key.grad is None
    with paddle.no_grad():
        assert bfloat16.attention(query, key, value, None).stop_gradient


@needs_operators
def test_starts_before_and_behind_a_row():
    operands = heads()
    with bfloat16.autocast():
        whole, early, late = (
            attend(*operands, start, nn.Dropout(0.0), KernelOptions()).numpy()
            for start in (None, paddle.full([1, 9], -3, "int64"), paddle.full([1, 9], 99, "int64"))
        )
    np.testing.assert_array_equal(early, whole)
    np.testing.assert_allclose(late[0, 0, 0], rounded(operands[2].numpy())[0, 0], rtol=1e-6)


@needs_operators
def test_more_shapes_than_are_kept():
    for rows in range(1, 300):
        x, y = random(rows, 4), random(4, 3)
        found = bfloat16.matmul(paddle.to_tensor(x), paddle.to_tensor(y)).numpy()
        np.testing.assert_allclose(found, rounded(x) @ rounded(y), rtol=1e-5, atol=1e-5)


@needs_operators
def test_attention_that_stays_in_float32():
    operands, dropout = heads(groups=2), nn.Dropout(0.0)
    for options in (KernelOptions(softcap=5.0), KernelOptions(kernel="reference")):
        expected = attend(*operands, None, dropout, options).numpy()
        with bfloat16.autocast():
            np.testing.assert_array_equal(attend(*operands, None, dropout, options).numpy(), expected)
    with bfloat16.autocast():
        dropped = attend(*operands, None, nn.Dropout(0.5), KernelOptions())
    assert not np.allclose(dropped.numpy(), attend(*operands, None, dropout, KernelOptions()).numpy())


class _Head(ChunkedHead):
    def __init__(self, num_chunks, matmul):
        super().__init__(num_chunks, matmul)
        self.weight = self.create_parameter([12, 8])
        self.weight.set_value(random(12, 8))

    def matrix(self):
        return self.weight, None, True


@needs_operators
@pytest.mark.parametrize("cast_to", [None, "bfloat16"])
def test_a_head_in_pieces(cast_to):
    """Loss and gradients equal those of whole logits."""
    matmul, found = Matmul(cast_to=cast_to), []
    for pieces in (1, 3):
        head, x = _Head(pieces, matmul), paddle.to_tensor(random(6, 2, 8), stop_gradient=False)
        target = ChunkTarget(
            paddle.zeros([2, 6]), paddle.ones([2, 6]), lambda logits, *_: logits.square().sum()
        )
        with bfloat16.autocast(), matmul.kept():
            loss = head.run_chunks(x, target)
            loss.backward()
        found.append([loss.numpy(), x.grad.numpy(), head.weight.grad.numpy()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2)


@needs_operators
def test_both_levels_keep_parameters_in_float32():
    for level in ("O1", "O2"):
        made = Precision(CFG.model_copy(update={"level": level}))
        assert made.matmuls_only and not made.lowers_parameters and made.types == ("float32",)
        with made.autocast():
            assert bfloat16.in_autocast()
        assert not bfloat16.in_autocast()


@needs_operators
def test_products_in_float32_by_the_black_list():
    """They multiply by the weights themselves, not by 16-bit copies."""
    layer, x, matmul = Linear(8, 4, bias=False), paddle.to_tensor(random(3, 8)), Matmul(cast_to="bfloat16")
    layer.weight.set_value(random(8, 4))
    black = Precision(CFG.model_copy(update={"custom_black_list": ("matmul",)}))
    black.cached_casts = matmul.kept
    with black.autocast():
        assert not bfloat16.in_autocast()
        found = matmul.linear(x, layer.weight).numpy()
    np.testing.assert_array_equal(found, layer(x).numpy())


@pytest.mark.parametrize(
    ("flags", "dtype", "words"),
    [
        ("avx512f avx512_bf16", "bfloat16", None),
        ("amx_bf16", "bfloat16", None),
        ("avx512f", "bfloat16", "AVX512-BF16"),
        ("avx512_bf16 avx512_fp16", "float16", "bfloat16, not float16"),
        ("", "bfloat16", "AVX512-BF16"),
    ],
)
def test_the_processor_decides(monkeypatch, flags, dtype, words):
    monkeypatch.setattr(device_support, "read_cpuinfo", lambda: f"flags : {flags}\n")
    cfg = load_config(NANO, ["Engine.mix_precision.enable=True", f"Engine.mix_precision.dtype={dtype}"])
    reasons = device_support.not_supported_reasons(cfg, "cpu")
    assert (device_support.cpu_obstacle(dtype) is None) == (words is None) == (reasons == [])
    if words:
        assert words in reasons[0] and "enable=auto" in reasons[0]
        mixed = cfg.Engine.mix_precision
        with pytest.raises(ConfigError, match=words):
            Precision(mixed)
        auto = Precision(mixed.model_copy(update={"enable": "auto"}))
        assert auto.types == ("float32",) and not auto.matmuls_only


def test_operators_that_are_not_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(mixed_precision.bfloat16, "are_available", lambda: False)
    monkeypatch.setattr(device_support, "read_cpuinfo", lambda: "flags : avx512_bf16\n")
    with pytest.raises(ConfigError, match="operators are not compiled"):
        Precision(CFG)
    assert not Precision(CFG.model_copy(update={"enable": "auto"})).matmuls_only
    cfg = load_config(NANO, ["Engine.mix_precision.enable=auto", "Engine.mix_precision.dtype=bfloat16"])
    monkeypatch.setattr(compiled, "BUILT", tmp_path)
    assert "float32 (Engine.mix_precision.enable is auto: operators are" in check_report(cfg)
    (tmp_path / "bfloat16-1.so").touch()  # of another version
    assert "float32 (Engine.mix_precision.enable is auto: operators are" in check_report(cfg)
    compiled.library_path("bfloat16").touch()
    assert "bfloat16 O2" in check_report(cfg)
