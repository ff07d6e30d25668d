"""The optimizer's fused operators: AdamW equal to the last bit, norms and scaling to 1e-6."""

import numpy as np
import paddle
import pytest

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.fused_ops import TABLE, FusedOps, choose, obstacles
from ppfleetx.nn.fused_trial_process import difference
from ppfleetx.optims import adamw, fused_trials
from ppfleetx.optims.build import build_optimizer
from ppfleetx.optims.gradients import scale_to_norm, squared_norm
from ppfleetx.optims.optimizer import UpdatePlace
from ppfleetx.optims.rule import ParamView
from tests.optims.test_optimizer import make_params, section, set_grads


def steps(optimizer, params, *, missing=()):
    """Four steps with changing rate and decay; in the second, the parameters ``missing`` have no gradient."""
    rng = np.random.default_rng(1)
    for step in range(4):
        set_grads(params, rng)
        for name, param in params:
            if step == 1 and name in missing:
                param.clear_gradient(False)
        optimizer.step(1e-2 / (step + 1), 0.1 * step)
        optimizer.clear_grad()
    return {name: param.numpy() for name, param in params} | {
        key: tensor.numpy() for key, tensor in optimizer.state().items()
    }


@pytest.mark.parametrize("missing", [(), ("decoder.final_norm.weight",)])
def test_many_parameters_at_once_are_bit_for_bit_one_after_the_other(missing, monkeypatch):
    calls = []
    run = adamw.fused_adamw
    monkeypatch.setattr(adamw, "fused_adamw", lambda *a, **k: calls.append(len(a[0])) or run(*a, **k))
    ours, theirs = (
        steps(build_optimizer(section(), params, UpdatePlace(fused=fused)), params, missing=missing)
        for fused, params in ((True, make_params()), (False, make_params()))
    )
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert np.array_equal(value, theirs[key]), key
    # Two of the four decay, and those are one call.
    assert calls == [2, 2, *([2, 1] if missing else [2, 2]), 2, 2, 2, 2]


def test_on_a_gpu_only_parameters_of_as_many_steps_share_a_call(monkeypatch):
    """The kernel uses the first parameter's powers of beta for all."""
    params = make_params()
    optimizer = build_optimizer(section(), params, UpdatePlace(fused=True))
    steps(optimizer, params, missing=("decoder.final_norm.weight",))
    powers = lambda views: [(view.states["beta1_pow"].item(), 1.0) for view in views]  # noqa: E731
    monkeypatch.setattr(adamw, "_powers", powers)
    calls = []
    monkeypatch.setattr(adamw, "fused_adamw", lambda parameters, *_, **__: calls.append(len(parameters)))
    set_grads(params, np.random.default_rng(0))
    optimizer.step(1e-2)
    assert sorted(calls) == [1, 1, 2]


def test_16_bit_parameters_go_one_by_one():
    for parameter, gradient in ((paddle.float16, paddle.float32), (paddle.float16, paddle.float16)):
        value, gradient = paddle.zeros([2], parameter), paddle.zeros([2], gradient)
        assert not adamw._fits(ParamView("w", None, value, gradient, {}))


def test_norm_and_clip_of_all_small_gradients_at_once():
    ops = FusedOps({"grad_norm": ["float32"], "grad_scale": ["float32"]})
    (ours, theirs), norms = (make_params(), make_params()), []
    for params, taken in ((ours, ops), (theirs, FusedOps())):
        set_grads(params, np.random.default_rng(3))
        tensors = [param for _, param in params]
        norms.append(squared_norm(tensors, taken).sqrt().item())
        scale_to_norm(tensors, norms[-1], 0.5, taken)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for (name, one), (_, other) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.grad.numpy(), other.grad.numpy(), rtol=1e-6, err_msg=name)
        assert np.abs(one.grad.numpy()).max() < 0.5


@pytest.mark.parametrize("name", ["adamw", "grad_norm", "grad_scale"])
def test_trials_pass_and_would_find_a_wrong_kernel(name):
    trial = getattr(fused_trials, name)
    assert TABLE[name].trials == fused_trials.__name__
    assert difference(trial, "float32") is None and obstacles([name], ["float32"])[name] == {"float32": None}
    pairs = list(trial("float32"))
    pairs[0][0].scale_(1.001)
    assert "differs from plain operators by" in difference(lambda _: pairs, "float32")


def test_a_cpu_takes_by_itself_what_changes_no_bit():
    ops = choose("auto", ("float32",), ParallelContext.single())
    assert ops.taken == {"adamw": ["float32"]}
    assert set(ops.refused) == set(TABLE) - {"adamw"}
