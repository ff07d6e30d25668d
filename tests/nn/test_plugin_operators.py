"""Operators of a device's plugin in place of plain ones: axes, masks, types and limits."""

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.base import core

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.device import kernel_types
from ppfleetx.nn import attention_kernels, flash, fused_ops, fused_trials, mlp, norm, positions
from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps, choose, forget_trials
from ppfleetx.nn.fused_trial_process import difference
from ppfleetx.nn.layers import Dropout
from ppfleetx.nn.masks import attention_mask
from ppfleetx.nn.positions import RotaryEmbedding
from tests.helpers import ascend
from tests.helpers.low_precision import emulated

OPERATORS = ("rms_norm", "rope", "plugin_attention")


@pytest.fixture
def plugin(monkeypatch):
    """Stand-ins for the operators of Ascend's plugin, for this process's device; records calls by name."""
    calls: dict[str, int] = {}

    def counted(name):
        def run(*args):
            calls[name] = calls.get(name, 0) + 1
            return getattr(ascend, name)(*args)

        return run

    for module in (norm, flash, positions, fused_ops):
        monkeypatch.setattr(module, "plugin_operator", counted)
    forget_trials()
    yield calls
    forget_trials()


@pytest.mark.parametrize("name", OPERATORS)
def test_they_give_what_plain_operators_give(plugin, name):
    assert difference(getattr(fused_trials, name), "float32") is None
    assert len(plugin) == 1 and all(plugin.values())


def test_a_mask_that_shows_what_it_should_hide_is_found(plugin, monkeypatch):
    monkeypatch.setattr(flash, "attention_mask", lambda *args: ~attention_mask(*args))
    with pytest.raises(AssertionError):
        difference(fused_trials.plugin_attention, "float32")


def test_the_gradient_of_a_gain_has_the_gain_s_type(plugin):
    with emulated():
        x = paddle.ones([4, 8]).astype("bfloat16")
        x.stop_gradient = False
        layer = norm.RMSNorm(8, 1e-5)
        layer.weight = layer.create_parameter([8], dtype="bfloat16")
        layer.fused = FusedOps({"rms_norm": ["bfloat16"]})
        layer(x).sum().backward()
    assert plugin and layer.weight.grad.dtype == paddle.bfloat16


def test_heads_that_the_operator_does_not_take_are_turned_by_plain_ones(plugin):
    rotary = RotaryEmbedding(16, 32, 100.0)
    rotary.fused = FusedOps({"rope": ["float32"]})
    rotary.rotate(paddle.ones([1, 1, 1, 4, 16]), paddle.arange(4).unsqueeze(0))
    assert not plugin


@pytest.mark.parametrize(
    ("ops", "dtype", "probability", "said"),
    [
        (FusedOps({"plugin_attention": ["bfloat16"]}), "bfloat16", 0.0, None),
        (FusedOps({"plugin_attention": ["bfloat16"]}), "float32", 0.0, "needs float16 or bfloat16"),
        (FusedOps({"plugin_attention": ["bfloat16"]}), "bfloat16", 0.1, "attention_probs_dropout_prob"),
        (NO_FUSED_OPS, "bfloat16", 0.0, "needs a GPU"),
    ],
)
def test_where_its_attention_serves(ops, dtype, probability, said):
    """The plugin drops attention weights only in the backward pass, so it is not used with dropout."""
    dropout = paddle.nn.Dropout(probability)
    query = paddle.zeros([1, 1, 1, 4, 64]).astype(dtype)
    found = flash.flash_obstacle(query, dropout, has_documents=True, fused=ops)
    assert found is None if said is None else said in found


def test_packed_documents_go_through_it(plugin):
    """Training on two documents in a row equals the reference kernel."""
    options = attention_kernels.KernelOptions(fused=FusedOps({"plugin_attention": ["float32"]}))
    query, key = (
        paddle.to_tensor(np.random.default_rng(0).standard_normal(s).astype("float32"))
        for s in ([1, 2, 2, 16, 64], [1, 2, 16, 64])
    )
    start = paddle.to_tensor(np.array([[0] * 9 + [9] * 7], np.int32))
    dropout = paddle.nn.Dropout(0.0)
    expected = attention_kernels.attend(
        query, key, key, start, dropout, attention_kernels.KernelOptions("reference")
    )
    found = attention_kernels.attend(query, key, key, start, dropout, options)
    assert plugin == {"flash_attention_npu": 1}
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_they_are_chosen_where_they_are_and_refused_elsewhere(plugin, monkeypatch):
    listed, single = ["rms_norm", "rope"], ParallelContext.single()
    assert set(choose(listed, ["float32"], single).taken) == set(listed)
    for name in listed:
        monkeypatch.setattr(fused_ops, "plugin_operator", lambda _: None)
        with pytest.raises(ConfigError, match="no float32 kernel"):
            choose([name], ["float32"], single)
    with pytest.raises(ConfigError, match="no plugin with flash_attention_npu"):
        choose(["plugin_attention"], ["bfloat16"], single)


@pytest.mark.parametrize("operator", [mlp.relu, Dropout(0.5)], ids=["relu", "dropout"])
def test_what_a_device_cannot_do_in_bfloat16_it_does_in_float32(monkeypatch, operator):
    """The CPU's kernel would use another random generator, or does not exist."""
    keys = ["(npu, Undefined(AnyLayout), float32)"]
    monkeypatch.setattr(core, "_get_registered_phi_kernels", lambda _: {"relu": keys, "dropout": keys})
    monkeypatch.setattr(paddle, "get_device", lambda: "npu:0")
    kernel_types.cache_clear()
    used = []
    for module, name in ((F, "relu"), (F, "dropout")):
        monkeypatch.setattr(module, name, lambda x, *_, **__: used.append(x.dtype) or x)
    for dtype in (paddle.bfloat16, paddle.float32):
        assert operator(paddle.ones([4]).astype(dtype)).dtype == dtype
    assert used == [paddle.float32] * 2
    kernel_types.cache_clear()
