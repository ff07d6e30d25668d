"""Layers with 8-bit and 4-bit weights: products against float64, with and without operators, and of
slices."""

import os
from functools import partial

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.mesh import Mesh
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.sections.compress import Form, WeightsConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn import quantized
from ppfleetx.nn.cpu_ops import quantized as cpu_ops
from ppfleetx.nn.cpu_ops.compiled import WIDTH
from ppfleetx.nn.init import Constant
from ppfleetx.nn.layer_factory import InferenceFactory, LocalFactory
from ppfleetx.nn.layers import Linear
from ppfleetx.nn.param_spec import Shard, dense
from ppfleetx.nn.quantized import QuantizedLinear, QuantizedMatrix, with_quantized_weights
from ppfleetx.nn.stage import canonical_parameters, declare
from tests.nn.quantized_products import check_case, pack

needs_operators = pytest.mark.skipif(
    not cpu_ops.are_available(), reason="the operators are not compiled (python -m ppfleetx.nn.cpu_ops)"
)
WITH_OFFSETS = Form(4, 16, asymmetric=True)
FORMS = [
    Form(8),
    Form(8, 16),
    Form(4, 16),
    Form(4),
    Form(8, None, 8),
    WITH_OFFSETS,
    Form(8, 16, asymmetric=True),
]


def _matrix(form: Form, size: int = 64, columns: int = 50) -> QuantizedMatrix:
    rng = np.random.default_rng(1)
    largest = (1 << (form.bits - 1)) - 1
    levels = rng.integers(-largest, largest + 1, (size, columns)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (size // (form.group_size or size), columns)).astype(np.float32)
    if form.asymmetric:
        offset = rng.uniform(-0.3, 0.3, scale.shape)
        scale = np.stack([scale, offset], axis=1).reshape(-1, columns).astype(np.float16)
    stored = levels if form.bits == 8 else pack(levels)
    return QuantizedMatrix(paddle.to_tensor(stored), paddle.to_tensor(scale), form)


@needs_operators
def test_products_are_those_of_float64() -> None:
    rng = np.random.default_rng(5)
    for _ in range(150):
        check_case(rng)


@needs_operators
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_rows_beside_it(form: Form) -> None:
    # Each thread reads panels side by side, and some panels are left.
    columns = WIDTH * (4 * (os.cpu_count() or 1) + 1) + 2
    matrix, x = _matrix(form, columns=columns), paddle.randn([70, 64])
    together = matrix.linear(x).numpy()
    for count in (1, 2, 5, 8, 33):
        np.testing.assert_array_equal(matrix.linear(x[:count]).numpy(), together[:count])


@needs_operators
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 40])
def test_without_operators_results_are_the_same(
    form: Form, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, bias = paddle.randn([2, rows, 64]), paddle.randn([50])
    with_operators = _matrix(form).linear(x, bias).numpy()
    monkeypatch.setattr(quantized.cpu_ops, "are_available", lambda: False)
    without = _matrix(form).linear(x, bias).numpy()
    assert with_operators.shape == (2, rows, 50)
    np.testing.assert_allclose(without, with_operators, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("form", [Form(8), Form(4, 16), WITH_OFFSETS])
def test_what_is_no_number_stays_none(form: Form) -> None:
    x = paddle.randn([3, 64])
    x[1, 5] = float("nan")
    result = _matrix(form).linear(x).numpy()
    assert np.isnan(result[1]).all() and np.isfinite(result[[0, 2]]).all()


@needs_operators
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_without_a_grid_give_nan(value: float) -> None:
    x = paddle.randn([3, 64])
    x[1, 5] = value
    result = _matrix(Form(8, None, 8)).linear(x).numpy()
    assert np.isnan(result[1]).all() and np.isfinite(result[[0, 2]]).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_the_input_is_that_of_the_widened_matrix(form: Form) -> None:
    matrix, bias = _matrix(form), paddle.randn([50])
    x = paddle.randn([3, 2, 64])
    expected = matrix.linear(x, bias).numpy()
    x.stop_gradient = False
    given = matrix.linear(x, bias)
    np.testing.assert_allclose(given.numpy(), expected, rtol=1e-5, atol=2e-4)
    upstream = paddle.randn(given.shape)
    (given * upstream).sum().backward()
    wanted = upstream.numpy() @ matrix.dequantized().numpy().T
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=1e-5, atol=1e-4)


def test_on_a_gpu_paddles_kernel_takes_8_bit_weights_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the test checks the arguments of Paddle's functions, and for which matrices they are
    called."""
    asked = []

    def quantize(wide: paddle.Tensor, algo: str, arch: int) -> tuple[str, str]:
        asked.append((wide.shape, str(wide.dtype), algo, arch))
        return "integers", "scale"

    def multiply(x: paddle.Tensor, weight: str, bias: object, scale: str, dtype: str, arch: int) -> str:
        asked.append((x.shape, weight, bias, scale, dtype, arch))
        return "product"

    monkeypatch.setattr(quantized, "weight_quantize", quantize)
    monkeypatch.setattr(quantized, "weight_only_linear", multiply)
    monkeypatch.setattr(quantized, "on_gpu", lambda: True)
    monkeypatch.setattr(quantized, "capability", lambda device: (8, 0))
    matrix, x = _matrix(Form(8), 64, 128), paddle.randn([2, 64]).astype("float16")
    assert [matrix.linear(x), matrix.linear(x)] == ["product"] * 2
    multiplied = ([2, 64], "integers", None, "scale", "int8", 80)
    assert asked == [([64, 128], "paddle.float16", "weight_only_int8", 80), multiplied, multiplied]
    for other in (
        _matrix(Form(8), 64, 50),
        _matrix(Form(4, 16), 64, 128),
        _matrix(WITH_OFFSETS, 64, 128),
        _matrix(Form(8, None, 8), 64, 128),
    ):
        assert other._gpu_arch(x) is None
    assert matrix._gpu_arch(x.astype("float32")) is None
    monkeypatch.setattr(quantized, "capability", lambda device: (6, 1))
    assert matrix._gpu_arch(x) is None


@needs_operators
def test_panels_of_another_matrix_are_refused() -> None:
    matrix, other = _matrix(Form(4, 16)), _matrix(Form(4, 16), size=32)
    with pytest.raises(Exception, match="panels do not fit"):
        matrix.multiply_panels(paddle.randn([2, 64]), other.make_panels(), None)
    with pytest.raises(Exception, match="must be float32"):
        matrix.multiply_panels(paddle.randn([2, 64]).astype("float64"), matrix.make_panels(), None)


_declare_here = partial(declare, mesh=Mesh(ParallelPlan(mp=4)), rank=1)


def _sliced(dim: int, form: Form) -> QuantizedLinear:
    """One of four equal slices of a linear."""
    linear = Linear(64, 50, bias=False)
    shape = (256, 50) if dim == 0 else (64, 200)
    _declare_here(linear.weight, dense(shape, Constant(0.0), "matrix", mp=Shard(dim)))
    return QuantizedLinear(linear, form, declare=_declare_here)


def test_slices_of_ranks() -> None:
    rows = _sliced(0, Form(4, 32))
    assert (rows.weight.info.global_shape, rows.weight.info.offset) == ((128, 50), (32, 0))
    assert (rows.scale.info.global_shape, rows.scale.info.offset) == ((8, 50), (2, 0))
    offsets = _sliced(0, Form(4, 32, asymmetric=True))
    assert (offsets.scale.info.global_shape, offsets.scale.info.offset) == ((16, 50), (4, 0))
    columns = _sliced(1, Form(8))
    assert (columns.weight.info.global_shape, columns.weight.info.offset) == ((64, 200), (0, 50))
    assert (columns.scale.info.global_shape, columns.scale.info.offset) == ((1, 200), (0, 50))


def test_groups_that_ranks_would_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"groups of 128 .* leaves 64 of 256 to a rank"):
        _sliced(0, Form(4, 128))
    whole = Linear(64, 50, bias=False)
    declare(whole.weight, dense((64, 50), Constant(0.0), "matrix"))
    with pytest.raises(ConfigError, match="groups of 48 do not divide 64 input features"):
        QuantizedLinear(whole, Form(4, 48))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("skip", [(), ("head", "embedding.*"), ("*.mlp.fc2",)])
def test_which_layers_are_stored_small(tied: bool, skip: tuple[str, ...]) -> None:
    cfg = ModelConfig(
        vocab_size=61, hidden_size=32, num_layers=2, num_attention_heads=4, tie_word_embeddings=tied
    )
    weights = WeightsConfig(bits=4, group_size=16, skip=skip)
    factory = InferenceFactory()
    model = StagedModel(with_quantized_weights(gpt_stages(cfg, factory), weights, factory), None)
    types = {name: str(p.dtype) for name, p in canonical_parameters(model).items()}
    small = {name.removesuffix(".weight") for name, dtype in types.items() if "int8" in dtype}
    linears = ("attention.qkv", "attention.out_proj", "mlp.fc1", "mlp.fc2")
    expected = {f"decoder.layers.{i}.{linear}" for i in range(2) for linear in linears}
    expected |= {"embedding.word_embeddings"} | (set() if tied else {"head"})
    expected = {name for name in expected if weights.form_of(name)}
    assert small == expected
    assert {name.removesuffix(".scale") for name in types if name.endswith(".scale")} == expected
    assert types["embedding.position_embeddings.weight"] == "paddle.float32"


def test_adapters_beside_quantised_weights_get_gradients_alone() -> None:
    cfg = ModelConfig(vocab_size=61, hidden_size=32, num_layers=1, num_attention_heads=4, lora={"rank": 2})
    factory = LocalFactory()
    weights = WeightsConfig(bits=4, group_size=16)
    model = StagedModel(with_quantized_weights(gpt_stages(cfg, factory), weights, factory), seed=3)
    parameters = canonical_parameters(model)
    assert tuple(parameters["decoder.layers.0.mlp.fc1.lora.a"].shape) == (32, 2)
    for name, parameter in parameters.items():
        if name.endswith("lora.b"):
            parameter.set_value(paddle.ones_like(parameter))
    model.train()
    model(paddle.arange(8).reshape([1, 8])).square().mean().backward()
    assert {name for name, p in parameters.items() if p.grad is not None} == {
        name for name in parameters if ".lora." in name
    }
