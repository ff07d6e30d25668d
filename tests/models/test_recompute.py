"""Recomputation changes no bit of the gradients, with dropout too."""

from functools import partial

import numpy as np
import paddle
import pytest

from ppfleetx.models.gpt import layers
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn import attention, attention_kernels, flash
from ppfleetx.nn.attention_kernels import KernelOptions
from ppfleetx.nn.fused_ops import FusedOps
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.recompute import recompute
from ppfleetx.nn.stage import canonical_parameters
from tests.models.gpt_builders import LLAMA_STYLE, build, random_tokens, tiny_config

DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}


def gradients(packs=True, fused=None, **keys):
    cfg, factory = tiny_config(num_layers=4, **DROPOUT, **keys), LocalFactory()
    factory.fused = FusedOps(fused)
    model = StagedModel(gpt_stages(cfg, factory), seed=1)
    paddle.seed(11)
    starts = paddle.to_tensor([[0] * 5 + [5] * 7] * 2, dtype="int32") if packs else None
    logits = model(random_tokens(), document_start=starts)
    (token_loss(logits, random_tokens(), paddle.ones([2, 12]), 61).loss / 24).backward()
    after = paddle.rand([3]).numpy()  # the stream goes on from the same place
    return {name: p.grad.numpy() for name, p in canonical_parameters(model).items()} | {"after": after}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.fixture
def recomputed(monkeypatch):
    """Count the calls of recomputation."""
    calls = []
    for module in (layers, attention):
        original = module.recompute

        def counting(function, *args, _original=original):
            calls.append(getattr(function, "func", function).__name__)
            return _original(function, *args)

        monkeypatch.setattr(module, "recompute", counting)
    return calls


@pytest.mark.parametrize("style", [{}, LLAMA_STYLE], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    ("granularity", "function"), [("full", "transform"), ("full_attn", "attend"), ("core_attn", "core")]
)
def test_gradients_are_bitwise_equal(recomputed, style, granularity, function):
    expected = gradients(**style)
    assert recomputed == []
    actual = gradients(**style, use_recompute=True, recompute_granularity=granularity)
    assert recomputed == [function] * 4
    assert_equal(actual, expected)


@pytest.fixture
def packed_flash(monkeypatch):
    """Pretend that packed flash attention can run; the reference computes the result of Paddle's operator.
    Count the calls."""
    calls = []

    def composite(rows, *, dropout, causal, training):
        assert causal and training
        calls.append(dropout)
        query, key, value = rows.transpose([2, 0, 3, 1, 4]).unbind(0)
        drops = paddle.nn.Dropout(dropout)
        context = attention_kernels.reference_attention(
            query.unsqueeze(2), key, value, None, drops, KernelOptions()
        )
        return context.squeeze(2).transpose([0, 2, 1, 3]), None

    monkeypatch.setattr(flash.F.flash_attention, "flash_attn_qkvpacked", composite)
    monkeypatch.setattr(attention_kernels, "flash_obstacle", lambda *_, **__: None)
    return calls


@pytest.mark.parametrize(
    ("granularity", "function"),
    [("full", "transform"), ("full_attn", "attend"), ("core_attn", "packed_flash_attention")],
)
def test_fused_attention_is_recomputed_too(recomputed, packed_flash, granularity, function):
    options = {"packs": False, "fused": {"packed_attention": ["float32"]}}
    expected = gradients(**options)
    assert recomputed == [] and packed_flash == [0.2] * 4
    actual = gradients(**options, use_recompute=True, recompute_granularity=granularity)
    assert recomputed == [function] * 4 and packed_flash == [0.2] * (4 + 8)
    assert_equal(actual, expected)


def scaled(x, factor=1.0, *, power=2):
    return factor * x**power


class Scaled(paddle.nn.Layer):
    def forward(self, x, *, factor=1.0):
        return scaled(x, factor)


@pytest.mark.parametrize(
    "function",
    [
        scaled,
        partial(scaled, factor=3.0),
        partial(scaled, power=3),
        lambda x, **more: scaled(x, **more),
        Scaled(),
    ],
    ids=["keyword-only default", "partial", "partial keyword-only", "lambda", "layer"],
)
def test_any_callable_can_be_recomputed(function):
    """fleet inspects the signature, and refuses some."""
    one, other = (paddle.to_tensor([1.0, 2.0], stop_gradient=False) for _ in range(2))
    recompute(function, one).sum().backward()
    function(other).sum().backward()
    np.testing.assert_array_equal(one.grad.numpy(), other.grad.numpy())


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({}, 4),
        ({"recompute_interval": 2}, 2),
        ({"recompute_interval": 3}, 2),
        ({"no_recompute_layers": [0, 3]}, 2),
        ({"recompute_layers": [1]}, 1),
        ({"recompute_layers": []}, 0),
    ],
)
def test_chosen_layers(recomputed, keys, count):
    gradients(use_recompute=True, **keys)
    assert len(recomputed) == count


def test_nothing_is_recomputed_without_a_backward_pass(recomputed):
    model = build(tiny_config(use_recompute=True))
    with paddle.no_grad():
        model(random_tokens())
    model.eval()
    model(random_tokens())
    assert recomputed == []


def test_dropout_acts_in_training_only():
    model = build(tiny_config(**DROPOUT))
    first, second = model(random_tokens()), model(random_tokens())
    assert np.abs((first - second).numpy()).max() > 1e-4
    model.eval()
    np.testing.assert_array_equal(model(random_tokens()).numpy(), model(random_tokens()).numpy())
