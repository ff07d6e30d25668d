"""Recomputation changes no number: gradients are bitwise those without it, dropout included."""

import numpy as np
import paddle
import pytest

from ppfleetx.models.gpt import layers
from ppfleetx.nn import attention
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.stage import canonical_parameters
from tests.models.gpt_builders import LLAMA_STYLE, build, random_tokens, tiny_config

DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}


def gradients(**keys):
    model = build(tiny_config(num_layers=4, **DROPOUT, **keys))
    paddle.seed(11)
    starts = paddle.to_tensor([[0] * 5 + [5] * 7] * 2, dtype="int32")
    logits = model(random_tokens(), document_start=starts)
    loss_sum, count = token_loss(logits, random_tokens(), paddle.ones([2, 12]), 61)
    (loss_sum / count).backward()
    after = paddle.rand([3]).numpy()  # the stream goes on from the same place
    return {name: p.grad.numpy() for name, p in canonical_parameters(model).items()} | {"after": after}


@pytest.fixture
def recomputed(monkeypatch):
    """Counts the calls that are recomputed."""
    calls = []
    for module in (layers, attention):
        original = module.recompute

        def counting(function, *args, _original=original):
            calls.append(function.__name__)
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
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


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
