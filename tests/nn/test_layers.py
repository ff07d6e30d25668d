"""Norms, activations, rotary positions, masks, loss and kernels against NumPy in float64."""

import math

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import ACTIVATIONS, NORMS, ActivationTraits
from ppfleetx.nn.attention_kernels import KernelOptions, attend, reference_attention
from ppfleetx.nn.cpu_ops import ops
from ppfleetx.nn.init import Constant, Normal
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.layer_spec import LinearSpec, NormSpec
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.masks import attention_mask, blocked_score, flash_row_limits
from ppfleetx.nn.mlp import MLP
from ppfleetx.nn.mlp_spec import MLPSpec

RNG = np.random.default_rng(0)


def tensor(values, grad=False):
    return paddle.to_tensor(np.asarray(values, dtype=np.float32), stop_gradient=not grad)


def numerical_gradient(function, x, upstream, eps=1e-6):
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        step = np.zeros_like(x)
        step[index] = eps
        gradient[index] = ((function(x + step) - function(x - step)) * upstream).sum() / (2 * eps)
    return gradient


def norm64(kind, x, gain, bias, eps):
    if kind.startswith("LayerNorm"):
        x = x - x.mean(-1, keepdims=True)
    gain = gain + 1.0 if kind.endswith("1P") else gain
    has_bias = "bias" in NORMS.traits(kind).parameters
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain + (bias if has_bias else 0.0)


def check_norm(layer, reference, gain, x, upstream, normalized):
    """Compare values, and gradients of input and gain; ``normalized`` is the result with the gain 1."""
    layer.weight.set_value(gain.astype("float32"))
    xt = tensor(x, grad=True)
    out = layer(xt)
    np.testing.assert_allclose(out.numpy(), reference(x), rtol=1e-4, atol=1e-5)
    (out * tensor(upstream)).sum().backward()
    for found, expected in (
        (xt.grad, numerical_gradient(reference, x, upstream)),
        (layer.weight.grad, (upstream * normalized).sum((0, 1))),
    ):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", NORMS.names())
@pytest.mark.parametrize(("training", "compiled"), [(True, True), (True, False), (False, True)])
def test_norm(kind, training, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(ops, "are_available", lambda: False)
    layer = LocalFactory().norm(NormSpec(kind, 10, 1e-3, gain=0.5))
    layer.train() if training else layer.eval()
    assert layer.weight.info.init == Constant(-0.5 if kind.endswith("1P") else 0.5)
    has_bias = layer.bias is not None if kind.startswith("LayerNorm") else False
    gain, bias, x = RNG.normal(size=10), RNG.normal(size=10), RNG.normal(size=(3, 2, 10)) * 3 + 5
    upstream = RNG.normal(size=x.shape)
    if has_bias:
        layer.bias.set_value(bias.astype("float32"))
    normalized = norm64(kind.removesuffix("1P"), x, 1.0, 0.0, 1e-3)
    check_norm(layer, lambda v: norm64(kind, v, gain, bias, 1e-3), gain, x, upstream, normalized)
    if has_bias:
        np.testing.assert_allclose(layer.bias.grad.numpy(), upstream.sum((0, 1)), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not ops.are_available(), reason="the operators are not compiled")
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("size", [5, 48])
def test_gradients_of_a_norm_over_many_rows(kind, size, monkeypatch):
    """They are the same with and without our operator, which sums the rows in blocks."""
    x, upstream = RNG.normal(size=(100, 3, size)) + 1.0, tensor(RNG.normal(size=(100, 3, size)))
    found = []
    for compiled in (True, False):
        monkeypatch.setattr(ops, "are_available", lambda compiled=compiled: compiled)
        layer, xt = LocalFactory().norm(NormSpec(kind, size, 1e-5)), tensor(x, grad=True)
        layer.train()
        layer.weight.set_value(np.linspace(0.5, 2.0, size, dtype=np.float32))
        (layer(xt) * upstream).sum().backward()
        found.append([xt.grad.numpy(), *(parameter.grad.numpy() for parameter in layer.parameters())])
    for ours, plain in zip(*found, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["LayerNormNoBias", "RMSNorm", "RMSNorm1P"])
@pytest.mark.parametrize("training", [True, False])
def test_norm_of_each_head_with_a_gain_of_its_own(kind, training):
    layer = LocalFactory().norm(NormSpec(kind, 12, 1e-3, has_gain_per_head=True, head_size=4))
    layer.train() if training else layer.eval()
    assert dict(layer.named_parameters()).keys() == layer.state_dict().keys() == {"weight"}
    gain, x, upstream = RNG.normal(size=12), RNG.normal(size=(3, 2, 12)) * 3, RNG.normal(size=(3, 2, 12))

    def expected(x, gain=gain):
        heads = norm64(kind, x.reshape(3, 2, 3, 4), gain.reshape(3, 4), 0.0, 1e-3)
        return heads.reshape(3, 2, 12)

    normal = expected(x, np.full(12, 0.0 if kind.endswith("1P") else 1.0))
    check_norm(layer, expected, gain, x, upstream, normal)
    low = layer(tensor(x).astype("bfloat16"))
    assert low.dtype == paddle.bfloat16
    np.testing.assert_allclose(low.astype("float32").numpy(), expected(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", ["LayerNorm1P", "RMSNorm1P"])
def test_a_gain_around_one_is_not_rounded_to_16_bits(kind):
    layer = LocalFactory().norm(NormSpec(kind, 64, 1e-6))
    x, gain = RNG.normal(size=(1, 8, 64)), RNG.normal(size=64) * 0.01
    layer.weight.set_value(gain.astype("float32"))
    layer.to(dtype="bfloat16")
    xt = tensor(x).astype("bfloat16")
    out = layer(xt)
    assert out.dtype == paddle.bfloat16
    stored = layer.weight.astype("float32").numpy().astype(np.float64)
    expected = norm64(kind, xt.astype("float32").numpy().astype(np.float64), stored, 0.0, 1e-6)
    assert np.abs(out.astype("float32").numpy() / expected - 1).max() < 2**-8


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("frozen", [{"x"}, {"weight"}, {"weight", "bias"}, {"bias", "x"}, {"linear"}])
def test_frozen_inputs_and_parameters_get_no_gradient_and_the_rest_does(kind, frozen):
    norm = LocalFactory().norm(NormSpec(kind, 8, 1e-5))
    linear = LocalFactory().linear(LinearSpec(8, 8, "columns", True, Normal(1.0)))
    linear.weight.set_value(RNG.normal(size=(8, 8)).astype("float32"))
    x = tensor(RNG.normal(size=(3, 2, 8)), grad=True)
    tensors = {"x": x, **dict(norm.named_parameters()), "linear": linear.bias}
    for name, value in tensors.items():
        value.stop_gradient = name in frozen
    linear(norm(x)).sum().backward()
    assert {name for name, value in tensors.items() if value.grad is None} == frozen & tensors.keys()


def activation64(name, x):
    erf = np.vectorize(math.erf)
    if name == "gelu":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "gelu_exact":
        return 0.5 * x * (1 + erf(x / math.sqrt(2)))
    if name == "quick_gelu":
        return x / (1 + np.exp(-1.702 * x))
    if name == "swiglu":
        gate, up = x[..., 0::2], x[..., 1::2]
        return gate / (1 + np.exp(-gate)) * up
    if name == "geglu_tanh":
        return activation64("gelu", x[..., 0::2]) * x[..., 1::2]
    return np.maximum(x, 0) ** (2 if name == "relu2" else 1)


@pytest.mark.parametrize("name", ACTIVATIONS.names())
def test_activation_and_its_gradient(name):
    x = RNG.normal(size=(3, 2, 8)) * 2
    xt = tensor(x, grad=True)
    out = ACTIVATIONS.load(name)(xt)
    np.testing.assert_allclose(out.numpy(), activation64(name, x), rtol=1e-4, atol=1e-5)
    upstream = RNG.normal(size=out.shape)
    (out * tensor(upstream)).sum().backward()
    expected = numerical_gradient(lambda v: activation64(name, v), x, upstream)
    np.testing.assert_allclose(xt.grad.numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not ops.are_available(), reason="the operators are not compiled")
def test_the_gradient_of_gelu_at_large_numbers():
    x = tensor([-1e25, -1e13, -100.0, 100.0, 1e13, 1e25], grad=True)
    ops.gelu_tanh(x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [0, 0, 0, 1, 1, 1], atol=1e-6)


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r"Model\.normalization = 'BatchNorm'"):
        LocalFactory().norm(NormSpec("BatchNorm", 4, 1e-5))
    with pytest.raises(ConfigError, match=r"Model\.hidden_act = 'mish'"):
        MLP(LocalFactory(), MLPSpec(4, 8, "mish", True, Normal(1.0), Normal(1.0)))


@pytest.mark.parametrize(
    ("part", "gated", "said"),
    [
        (
            lambda x: x[..., ::2],
            False,
            r"one with a gate.*gated=True.*given \[1, 1, 8\] and returned \[1, 1, 4\]",
        ),
        (lambda x: x, True, r"with ActivationTraits\(gated=True\), and must return half the width"),
        (lambda x, slope: x, False, "does not take that: missing a required argument: 'slope'"),
        (lambda x: None, False, "must return an object of the type Tensor. It returned None"),
    ],
)
def test_an_activation_is_what_its_traits_say(monkeypatch, part, gated, said):
    monkeypatch.setattr(ACTIVATIONS, "_entries", {**ACTIVATIONS._entries})
    ACTIVATIONS.register("own", part, traits=ActivationTraits(gated=gated))
    with pytest.raises(ConfigError, match=r"Model\.hidden_act = 'own': .*" + said):
        MLP(LocalFactory(), MLPSpec(4, 8, "own", True, Normal(1.0), Normal(1.0)))


def test_mask_against_its_definition():
    starts = np.array([[0, 0, 3, 3], [1, 1, 1, 5]])
    mask = attention_mask(4, 7, paddle.to_tensor(starts, dtype="int32")).numpy()
    for b, q, k in np.ndindex(2, 4, 7):
        assert mask[b, 0, q, k] == (starts[b, q] <= k <= q + 3), (b, q, k)
    plain = attention_mask(4, 7, None).numpy()
    np.testing.assert_array_equal(plain[0, 0], np.tril(np.ones((4, 7), bool), 3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_blocked_scores_are_finite_and_below_all_others(dtype):
    """A row with left padding may have no allowed key; with infinite scores its softmax would be NaN."""
    dtype = getattr(paddle, dtype)
    blocked = float(paddle.full([], blocked_score(dtype), dtype=dtype).astype("float32"))
    assert np.isfinite(blocked)
    assert blocked < -6e4


def test_flash_row_limits_describe_the_same_mask():
    starts = np.array([[0, 0, 0, 3, 3, 5, 6, 6], [0] * 8])
    limits = flash_row_limits(paddle.to_tensor(starts, dtype="int32")).numpy()
    assert limits.shape == (2, 1, 8, 1) and limits.dtype == np.int32
    mask = attention_mask(8, 8, paddle.to_tensor(starts, dtype="int32")).numpy()
    for b, q, k in np.ndindex(2, 8, 8):
        assert mask[b, 0, q, k] == (k <= q < limits[b, 0, k, 0]), (b, q, k)


def attention64(query, key, value, mask):
    """Softmax attention with keys and values repeated for each query head."""
    scores = np.einsum("bgrqd,bgkd->bgrqk", query, key) / math.sqrt(query.shape[-1])
    scores = np.where(mask[:, :, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bgrqk,bgkd->bgrqd", weights / weights.sum(-1, keepdims=True), value)


@pytest.mark.parametrize(("groups", "per_group"), [(4, 1), (2, 3), (1, 4)])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_reference_attention(groups, per_group, past, packed):
    query = RNG.normal(size=(2, groups, per_group, 5, 8))
    key, value = RNG.normal(size=(2, 2, groups, 5 + past, 8))
    starts_t = paddle.to_tensor([[0, 0, 2, 2, 2], [0, 1, 1, 3, 3]], dtype="int32") if packed else None
    mask = attention_mask(5, 5 + past, starts_t).numpy()
    dropout = paddle.nn.Dropout(0.0)
    out = attend(tensor(query), tensor(key), tensor(value), starts_t, dropout, KernelOptions())
    np.testing.assert_allclose(out.numpy(), attention64(query, key, value, mask), rtol=1e-4, atol=1e-5)


def test_score_guard_is_not_applied_in_fp32():
    arrays = [tensor(RNG.normal(size=size)) for size in ((1, 2, 1, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))]
    dropout = paddle.nn.Dropout(0.0)
    plain = reference_attention(*arrays, None, dropout, KernelOptions())
    guarded = reference_attention(*arrays, None, dropout, KernelOptions(qk_scale_guard=24.0))
    np.testing.assert_array_equal(plain.numpy(), guarded.numpy())


@pytest.mark.parametrize("true_vocab", [11, 16])
def test_loss_by_hand(true_vocab):
    logits, labels = RNG.normal(size=(5, 3, 16)) * 3, RNG.integers(0, 11, (3, 5))
    mask = RNG.integers(0, 2, (3, 5)).astype(np.float32)
    lt = tensor(logits, grad=True)
    loss_sum = token_loss(lt, paddle.to_tensor(labels), tensor(mask), true_vocab).loss
    used = logits[..., :true_vocab]
    probabilities = np.exp(used) / np.exp(used).sum(-1, keepdims=True)
    expected, gradient = 0.0, np.zeros_like(logits)
    for s, b in np.ndindex(5, 3):
        expected -= mask[b, s] * np.log(probabilities[s, b, labels[b, s]])
        gradient[s, b, :true_vocab] = mask[b, s] * probabilities[s, b]
        gradient[s, b, labels[b, s]] -= mask[b, s]
    assert loss_sum.item() == pytest.approx(expected, rel=1e-5)
    (loss_sum * 0.5).backward()
    np.testing.assert_allclose(lt.grad.numpy(), gradient * 0.5, rtol=1e-4, atol=1e-6)
