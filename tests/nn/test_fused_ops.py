"""Fused operators of layers, on a CPU that lacks their kernels: stand-ins with the kernels' signatures.

The stand-ins are written from Paddle's documentation, not from our composites. Another test calls the real
operators and checks that they accept the arguments and fail only because the kernel is missing.
"""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import paddle
import pytest
from paddle import _C_ops
from paddle.base import core

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.model import FusedName
from ppfleetx.core.module.build import build_module
from ppfleetx.distributed.consistency_checks import NonFiniteSearch
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn import attention_kernels, flash, fused_trials
from ppfleetx.nn.fused_ops import TABLE, FusedOps, choose
from ppfleetx.nn.fused_trial_process import difference
from ppfleetx.nn.init import Normal
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.layer_spec import LinearSpec
from ppfleetx.nn.matmul import Matmul
from ppfleetx.parallel import parallelize
from tests.helpers.low_precision import emulated

NANO = "ppfleetx/configs/debug/gpt_nano.yaml"
LAYERS = ("rms_norm", "rope", "swiglu", "causal_softmax", "packed_attention", "linear_grad_add")


def rms_norm(x, scale, normalized_shape, epsilon):
    assert list(normalized_shape) == [x.shape[-1]] == list(scale.shape) and scale.dtype == x.dtype
    deviation = ((x * x).sum(-1, keepdim=True) / x.shape[-1] + epsilon).sqrt()
    return x / deviation * scale, 1.0 / deviation


def rotary(q, k, v, sin, cos, position_ids, use_neox_rotary_style, time_major, rotary_emb_base):
    """``[batch, seq, heads, size]`` and tables ``[1, positions, 1, size]``; without "neox", halves are
    paired."""
    assert k is v is None and not use_neox_rotary_style and not time_major
    b, s, _, size = q.shape
    assert sin.shape == cos.shape == [1, sin.shape[1], 1, size] and sin.shape[1] >= s
    assert position_ids.shape == [b, s] and position_ids.dtype == paddle.int64 and sin.dtype == q.dtype
    sin, cos = (t[0, :, 0].gather(position_ids.flatten()).reshape([b, s, 1, size]) for t in (sin, cos))
    left, right = q[..., : size // 2], q[..., size // 2 :]
    return q * cos + paddle.concat([-right, left], axis=-1) * sin, None, None


def triangle_softmax(x):
    assert x.ndim == 4 and x.shape[2] == x.shape[3] >= 32 and x.shape[2] % 8 == 0
    weights = paddle.exp(x - x.max(-1, keepdim=True)).tril()
    return weights / weights.sum(-1, keepdim=True)


def param_grad_add(x, dout, dweight, dbias, multi_precision, has_bias):
    """Without a previous sum, it creates one in float32."""
    assert multi_precision is True and has_bias is False and dbias is None and x.dtype == dout.dtype
    rows, upstream = (t.astype("float32").numpy().reshape([-1, t.shape[-1]]) for t in (x, dout))
    gradient = paddle.to_tensor(rows.T @ upstream)
    return (gradient if dweight is None else dweight.add_(gradient)), None


STAND_INS = {
    "fused_linear_param_grad_add": param_grad_add,
    "rms_norm": rms_norm,
    "fused_rotary_position_embedding": rotary,
    "fused_softmax_mask_upper_triangle": triangle_softmax,
}


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of each stand-in, and of the fused operators that a CPU has."""
    counts = dict.fromkeys((*STAND_INS, "swiglu"), 0)

    def counting(name, function):
        def run(*args):
            counts[name] += 1
            return function(*args)

        return run

    for name, function in {**STAND_INS, "swiglu": _C_ops.swiglu}.items():
        monkeypatch.setattr(_C_ops, name, counting(name, function))
    return counts


@pytest.mark.parametrize(
    ("name", "operator", "far_enough"),
    [
        ("rms_norm", "rms_norm", "`rms_norm` is not registered"),
        ("rope", "fused_rotary_position_embedding", "embedding` is not registered"),
        ("linear_grad_add", "fused_linear_param_grad_add", "grad_add` is not registered"),
        ("causal_softmax", "fused_softmax_mask_upper_triangle", "only supports GPU"),
    ],
)
def test_paddle_takes_the_calls_as_far_as_its_kernel(name, operator, far_enough, monkeypatch):
    trial, real = getattr(fused_trials, name), getattr(_C_ops, operator)
    assert far_enough in difference(trial, "float32")
    monkeypatch.setattr(_C_ops, operator, lambda *args: real(*args[:-1], "wrong"))
    assert far_enough not in difference(trial, "float32")


def test_trials_find_no_fault_with_the_stand_ins(calls):
    for name in LAYERS:
        assert TABLE[name].trials == fused_trials.__name__
        assert difference(getattr(fused_trials, name), "float32") is None, name
    assert all(calls.values())


def test_a_wrong_kernel_is_found(monkeypatch):
    def other_way(q, k, v, sin, *rest):
        return rotary(q, k, v, -sin, *rest)

    monkeypatch.setattr(_C_ops, "fused_rotary_position_embedding", other_way)
    assert "differs from plain operators by" in difference(fused_trials.rope, "float32")


def test_trials_are_without_tf32_whatever_is_allowed():
    before, used = core.get_cublas_switch(), []

    def trial(dtype):
        used.append(core.get_cublas_switch())
        yield paddle.ones([1]), paddle.ones([1])

    try:
        core.set_cublas_switch(True)
        assert difference(trial, "float32") is None
        assert used == [False] and core.get_cublas_switch()
    finally:
        core.set_cublas_switch(before)


def micro_batch(cfg, length):
    tokens = np.random.default_rng(0).integers(0, cfg.Model.vocab_size, (2, length + 1))
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": np.ones((2, length), np.float32),
        "position_ids": np.tile(np.arange(length), (2, 1)),
    }


@pytest.fixture
def without_and_with(monkeypatch):
    """Run a function with plain operators, and with the fused operators that are given."""

    def run(taken, function):
        results = []
        for fused in ({}, taken):
            monkeypatch.setattr(parallelize, "choose", lambda *_, fused=fused: FusedOps(fused))
            results.append(function())
        return results

    return run


@pytest.mark.parametrize("recompute", [{}, {"use_recompute": True}])
def test_a_model_trains_with_them_as_without(calls, recompute, without_and_with):
    model = {
        "num_layers": 2,
        "tie_word_embeddings": False,  # only 16-bit parameters join what lookups and products give
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "qk_layernorm": True,
        "num_query_groups": 2,
        "hidden_act": "swiglu",
        "normalization": "RMSNorm",
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.1,
        **recompute,
    }
    cfg = load_config(NANO, [f"Model.{key}={value}" for key, value in model.items()])

    def train():
        runner = parallelize.parallelize(build_module(cfg), cfg, ParallelContext.single(), train=True)
        assert not any(calls.values())
        batches = [micro_batch(cfg, 64)]
        steps = [runner.train_step(batches, step=n, lr=1e-3, weight_decay=0.1) for n in (1, 2)]
        return [(step.loss, step.grad_norm) for step in steps]

    np.testing.assert_allclose(*without_and_with(dict.fromkeys(LAYERS, ("float32",)), train), rtol=2e-5)
    passes = 4 if recompute else 2  # of two layers
    assert calls["swiglu"] == calls["fused_softmax_mask_upper_triangle"] == 2 * passes
    assert calls["fused_rotary_position_embedding"] == 4 * passes
    assert calls["rms_norm"] >= 8 * passes + 2


def test_packed_attention_is_taken_where_flash_runs_and_nothing_is_done_to_queries_alone(monkeypatch):
    qkv = paddle.zeros([8, 1, 2, 3, 16], "float16")
    dropout = paddle.nn.Dropout(0.0)
    options = attention_kernels.KernelOptions(fused=FusedOps({"packed_attention": ["float16"]}))
    assert not attention_kernels.packed_attention_serves(qkv, dropout, options)  # no GPU
    monkeypatch.setattr(flash, "on_gpu", lambda: True)
    monkeypatch.setattr(flash, "_capability", lambda device: (8, 0))
    assert attention_kernels.packed_attention_serves(qkv, dropout, options)
    assert not attention_kernels.packed_attention_serves(qkv.astype("float32"), dropout, options)
    assert not attention_kernels.packed_attention_serves(qkv, dropout, attention_kernels.KernelOptions())
    reference = attention_kernels.KernelOptions("reference", fused=options.fused)
    assert not attention_kernels.packed_attention_serves(qkv, dropout, reference)
    monkeypatch.setattr(flash, "_flag", lambda name, default: 3 if name.endswith("version") else default)
    assert not attention_kernels.packed_attention_serves(qkv, dropout, options)  # version 3 has no such entry


def test_what_is_listed_and_cannot_run_is_refused_with_the_reason():
    single = ParallelContext.single()
    with pytest.raises(ConfigError) as refused:
        choose(("swiglu", "rope"), ("float32",), single)
    for part in ("Model.fused_ops", "rope", "has no float32 kernel fused_rotary_position_embedding"):
        assert part in str(refused.value)
    assert choose(("swiglu",), ("float32",), single).taken == {"swiglu": ["float32"]}
    assert choose("none", ("float32",), single).taken == {}


def test_the_page_has_the_table():
    page = Path(__file__).parents[2].joinpath("docs/numerics.md").read_text(encoding="utf-8")
    section = page.split("## Fused operators")[1].split("\n## ")[0]
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows == list(TABLE) == list(get_args(FusedName))


def test_a_program_that_is_exported_has_plain_operators(monkeypatch):
    ops = FusedOps({"swiglu": ["float32"]})
    x = paddle.zeros([1])
    assert ops.takes("swiglu", x) and not ops.takes("swiglu", x.astype("float64"))
    monkeypatch.setattr(paddle, "in_dynamic_mode", lambda: False)
    assert not ops.takes("swiglu", x)


def mixed(level, *overrides):
    """Train a small float16 GPT for one step with three micro batches and a loss scale."""
    changes = {"mix_precision": {"enable": True, "dtype": "float16", "level": level, "scale_loss": 1024.0}}
    cfg = load_config(NANO, ["Model.num_layers=2", "Model.hidden_dropout_prob=0", *overrides])
    cfg = cfg.model_copy(update={"Engine": cfg.Engine.model_validate({**cfg.Engine.model_dump(), **changes})})
    return cfg, [micro_batch(cfg, 16)] * 2


def two_steps(cfg, batches):
    runner = parallelize.parallelize(build_module(cfg), cfg, ParallelContext.single(), train=True)
    steps = [runner.train_step(batches, step=n, lr=1e-3, weight_decay=0.1) for n in (1, 2)]
    assert not any(step.skipped for step in steps)
    return [(step.loss, step.grad_norm) for step in steps] + [runner.eval_step(batches)[:2]]


def test_weights_at_o2_get_their_gradients_in_float32(calls, monkeypatch, without_and_with):
    """The result equals that of plain operators, except for one rounding to 16 bits."""
    stand_in = _C_ops.fused_linear_param_grad_add

    def train():
        assert calls["fused_linear_param_grad_add"] == 0
        return two_steps(*mixed("O2"))

    with emulated():
        monkeypatch.setattr(_C_ops, "fused_linear_param_grad_add", stand_in)
        plain, fused = without_and_with({"linear_grad_add": ("float16",)}, train)
        monkeypatch.undo()
    np.testing.assert_allclose(plain, fused, rtol=2e-3)
    assert plain != fused
    # Four linears a layer, two layers, and the head; two micro batches, two steps.
    assert calls["fused_linear_param_grad_add"] == (4 * 2 + 1) * 2 * 2


def test_weights_at_o1_are_converted_once_a_step(monkeypatch, without_and_with):
    """The result has the same bits as with a conversion in every product."""
    made, init = [], Matmul.__init__
    monkeypatch.setattr(Matmul, "__init__", lambda self, **a: made.append(self) or init(self, **a))
    with emulated():
        plain, fused = without_and_with({"weight_cast": ("float16",)}, lambda: two_steps(*mixed("O1")))
        assert difference(fused_trials.weight_cast, "float16") is None
    assert plain == fused
    # Weight and bias of four linears in each of two layers, and the head; two steps and an evaluation.
    assert [casts for matmul in made if (casts := matmul.uses["casts"])] == [(2 * 4 * 2 + 1) * 3, 1]


QUANTIZATION = "Compress.Quantization"


def test_a_weight_that_is_rounded_has_no_copy_of_another(without_and_with):
    """Rounded weights are freed after their product, and Python reuses their ``id``."""
    with emulated():
        plain, fused = without_and_with(
            {"weight_cast": ("float16",)}, lambda: two_steps(*mixed("O1", f"{QUANTIZATION}.enable=True"))
        )
    assert plain == fused


def test_learned_clips_are_float32_beside_16_bit_weights():
    types = ("weight_preprocess_type", "activation_preprocess_type")
    options = [f"{QUANTIZATION}.enable=True", *(f"{QUANTIZATION}.{key}=PACT" for key in types)]
    cfg, batches = mixed("O2", *options, "Model.use_recompute=True")
    with emulated():
        runner = parallelize.parallelize(build_module(cfg), cfg, ParallelContext.single(), train=True)
        output = runner.train_step(batches, step=1, lr=1e-3, weight_decay=0.1)
    clips = [parameter for name, parameter in runner.named_parameters() if name.endswith("_clip")]
    assert np.isfinite(output.grad_norm) and not output.skipped
    assert {str(clip.dtype) for clip in clips} == {"paddle.float32"}
    assert sum(float(clip) != 1 for clip in clips) >= len(clips) // 2  # those of weights have moved


@pytest.mark.parametrize("wrong", [1.0, np.inf])
def test_the_search_for_what_is_not_finite_sees_gradients_that_products_add(calls, wrong):
    layer = LocalFactory().linear(LinearSpec(3, 4, "whole", True, Normal(1.0)))
    layer.weight.info = replace(layer.weight.info, name="weight")
    layer.bias.info = replace(layer.bias.info, name="bias")
    layer.linear = Matmul(fused=FusedOps({"linear_grad_add": ("float32",)})).linear
    x = paddle.ones([2, 3])
    with NonFiniteSearch([(0, layer)]) as search:
        (layer(x) * wrong).sum().backward()
    assert calls["fused_linear_param_grad_add"] == 1 and layer.weight.grad is None
    assert (search.backward is None) == (wrong == 1.0)
