"""AdamW against a NumPy AdamW, decay groups, state by canonical name, clipping."""

import re

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import OPTIMIZERS, OptimizerTraits
from ppfleetx.config.sections.optimizer import LRConfig, OptimizerConfig, WeightDecayScheduleConfig
from ppfleetx.nn.init import Constant
from ppfleetx.nn.param_spec import dense
from ppfleetx.nn.stage import declare
from ppfleetx.optims.adamw import AdamW
from ppfleetx.optims.build import build_optimizer, optimizer_groups
from ppfleetx.optims.gradients import scale_to_norm, squared_norm
from ppfleetx.optims.rule import SGD, Group, ParamView, Rule, StateSpec, UpdateRule
from ppfleetx.optims.schedules import build_schedule

SHAPES = {
    "embedding.word_embeddings.weight": [7, 4],
    "decoder.layers.0.attention.qkv.weight": [4, 12],
    "decoder.layers.0.attention.qkv.bias": [12],
    "decoder.final_norm.weight": [4],
}


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Forget the optimizers that a test registers."""
    monkeypatch.setattr(OPTIMIZERS, "_entries", {**OPTIMIZERS._entries})


def section(**changes):
    return OptimizerConfig(**{"weight_decay": 0.1, "beta2": 0.95, **changes})


def make_params(seed=0, kind=None):
    """Parameters by name. With ``kind``, a function of the name, they are declared with this kind."""
    rng = np.random.default_rng(seed)
    params = []
    for name, shape in SHAPES.items():
        param = paddle.create_parameter(shape, "float32")
        param.set_value(rng.standard_normal(shape).astype(np.float32))
        if kind is not None:
            declare(param, dense(tuple(shape), Constant(), kind(name)))
        params.append((name, param))
    return params


def set_grads(params, rng):
    grads = {}
    for name, param in params:
        grads[name] = rng.standard_normal(param.shape).astype(np.float32)
        param.grad = paddle.to_tensor(grads[name])
    return grads


def numpy_adamw(value, grad, moments, step, lr, weight_decay):
    m, v = moments
    m[:] = 0.9 * m + 0.1 * grad
    v[:] = 0.95 * v + 0.05 * grad * grad
    value *= 1 - lr * weight_decay
    value -= lr * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)


def test_equals_a_numpy_adamw_with_changing_rate_and_decay():
    params, rng = make_params(), np.random.default_rng(1)
    optimizer = build_optimizer(section(), params)
    expected = {name: param.numpy().astype(np.float64) for name, param in params}
    moments = {name: (np.zeros(s), np.zeros(s)) for name, s in SHAPES.items()}
    for step in range(1, 21):
        lr, weight_decay = 1e-2 / step, 0.01 * step
        grads = set_grads(params, rng)
        optimizer.step(lr, weight_decay)
        optimizer.clear_grad()
        for name in SHAPES:
            decay = weight_decay if name.endswith(("s.weight", "qkv.weight")) else 0.0
            numpy_adamw(expected[name], grads[name], moments[name], step, lr, decay)
    for name, param in params:
        assert param.grad is None
        np.testing.assert_allclose(param.numpy(), expected[name], rtol=1e-6, atol=1e-6)


def test_state_moves_to_a_new_optimizer_bit_for_bit():
    first, second = make_params(), make_params(seed=5)
    one, two = build_optimizer(section(), first), build_optimizer(section(), second)
    rng = np.random.default_rng(2)
    for _ in range(3):
        set_grads(first, rng)
        one.step(1e-2, 0.1)
    state = {key: tensor.numpy() for key, tensor in one.state().items()}
    assert set(state) == {(n, s) for n in SHAPES for s in ("moment1", "moment2", "beta1_pow", "beta2_pow")}
    for key, tensor in two.state().items():
        tensor.set_value(state[key])
    for (_, source), (_, target) in zip(first, second, strict=True):
        target.set_value(source.numpy())
    for params, optimizer in ((first, one), (second, two)):
        set_grads(params, np.random.default_rng(3))
        optimizer.step(1e-2, 0.1)
    for (_, a), (_, b) in zip(first, second, strict=True):
        assert np.array_equal(a.numpy(), b.numpy())


def test_frozen_parameters_have_no_state_and_do_not_move():
    params = make_params()
    params[0][1].stop_gradient = True
    before = params[0][1].numpy()
    optimizer = build_optimizer(section(), params)
    set_grads(params, np.random.default_rng(0))
    optimizer.step(1.0, 0.5)
    assert np.array_equal(params[0][1].numpy(), before)
    assert not any(name == params[0][0] for name, _ in optimizer.state())


def test_sgd_and_unknown_names():
    params = make_params()
    before = params[1][1].numpy()
    optimizer = build_optimizer(section(name="SGD"), params)
    grads = set_grads(params, np.random.default_rng(0))
    optimizer.step(0.5, 0.1)
    np.testing.assert_allclose(params[1][1].numpy(), before - 0.5 * grads[params[1][0]], rtol=1e-6)
    assert optimizer.state() == {}
    with pytest.raises(ConfigError, match="must be one of AdamW, Muon, SGD"):
        build_optimizer(section().model_copy(update={"name": "Lion"}), params)


@pytest.mark.parametrize("num_owned", [0, 1])
def test_an_owner_updates_what_it_owns_and_tells_of_each_update(num_owned):
    params, told = make_params(), []
    before = [param.numpy() for _, param in params]
    optimizer = build_optimizer(section(), params)
    owned = {id(param) for _, param in params[:num_owned]}
    optimizer.keep_only(lambda param: id(param) in owned, lambda: told.append(params[0][1].numpy()))
    set_grads(params, np.random.default_rng(0))
    optimizer.step(0.5, 0.25)
    optimizer.clear_grad()
    changed = [not np.array_equal(old, param.numpy()) for old, (_, param) in zip(before, params, strict=True)]
    assert changed == [number < num_owned for number in range(len(params))]
    assert len(told) == 1 and np.array_equal(told[0], params[0][1].numpy()), "once, after the update"
    assert all(param.grad is None for _, param in params)
    assert {name for name, _ in optimizer.state()} == {name for name, _ in params[:num_owned]}


def test_global_norm_counts_a_tied_parameter_once_and_keeps_digits():
    param = paddle.create_parameter([3_000_000], "float32")
    values = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)
    param.grad = paddle.to_tensor(values)
    expected = np.sqrt((values.astype(np.float64) ** 2).sum())
    assert squared_norm([param, param]).sqrt().item() == pytest.approx(expected, rel=1e-6)


def test_clip_scales_only_above_the_limit():
    params = make_params()
    grads = set_grads(params, np.random.default_rng(0))
    tensors = [param for _, param in params]
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    for limit in (1e3, None, 0.0):
        scale_to_norm(tensors, norm, limit)
        assert np.array_equal(tensors[1].grad.numpy(), grads[params[1][0]])
    scale_to_norm(tensors + tensors, norm, 1.0)
    for name, param in params:
        np.testing.assert_allclose(param.grad.numpy(), grads[name] / (norm + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_leaves_gradients_alone(bad):
    params = make_params()
    grads = set_grads(params, np.random.default_rng(0))
    tensors = [param for _, param in params]
    tensors[0].grad = paddle.full_like(tensors[0], bad)
    norm = squared_norm(tensors).sqrt().item()
    assert not np.isfinite(norm)
    scale_to_norm(tensors, norm, 1.0)
    assert np.array_equal(tensors[1].grad.numpy(), grads[params[1][0]])


def test_the_norm_of_no_gradients_is_zero():
    assert squared_norm([param for _, param in make_params()]).item() == 0.0


def test_schedule_from_the_optimizer_section():
    lr = LRConfig(name="CosineAnnealingWithWarmupDecay", max_lr=1e-3, min_lr=1e-4, warmup_rate=0.1)
    schedule = build_schedule(section(lr=lr), length=200)
    assert (schedule.warmup_steps, schedule.decay_steps, schedule.decay_style) == (20, 200, "cosine")
    assert schedule.weight_decay(7) == 0.1
    ramp = WeightDecayScheduleConfig(start=0.0, end=0.2)
    lr = LRConfig(decay_style="wsd", warmup_steps=5, decay_steps=100)
    schedule = build_schedule(section(lr=lr, weight_decay_schedule=ramp), length=200)
    assert (schedule.warmup_steps, schedule.wsd_decay_steps) == (5, 10)
    assert schedule.weight_decay(100) == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="not exceed decay_steps"):
        build_schedule(section(lr=LRConfig(warmup_steps=11)), length=10)


class Still(Rule):
    """Changes nothing, and has two states."""

    states = (StateSpec("one"), StateSpec("two"))

    def update(self, group, *, lr, weight_decay):
        pass


class Descent(UpdateRule):
    """An optimizer in the deprecated form."""

    states = ("count",)

    def update(self, parameter, gradient, states, *, lr, weight_decay):
        states["count"].add_(paddle.ones([]))
        parameter.subtract_(lr * (gradient + weight_decay * parameter))


def test_a_rule_of_one_tensor_at_a_time_works_for_one_more_version(caplog):
    OPTIMIZERS.register("Descent", Descent)
    params = make_params()
    before = {name: param.numpy() for name, param in params}
    optimizer = build_optimizer(section(name="Descent"), params)
    assert "make it a Rule" in caplog.text
    grads = set_grads(params, np.random.default_rng(0))
    optimizer.step(0.5, 0.1)
    for name, param in params:
        decay = 0.1 if param.ndim > 1 else 0.0
        wanted = before[name] - 0.5 * (grads[name] + decay * before[name])
        np.testing.assert_allclose(param.numpy(), wanted, rtol=1e-6)
        assert (optimizer.state()[name, "count"].numpy() == 1).all()


def test_groups_have_rules_and_states_of_their_own():
    def groups(cfg):
        return [Group("matrices", SGD(cfg), lambda spec: spec.kind == "matrix"), Group("rest", AdamW(cfg))]

    OPTIMIZERS.register("Two", groups, traits=OptimizerTraits(states=2))
    params = make_params(kind=lambda name: "matrix" if "qkv.weight" in name else "other")
    before = params[1][1].numpy()
    optimizer = build_optimizer(section(name="Two"), params)
    grads = set_grads(params, np.random.default_rng(0))
    optimizer.step(0.5, 0.1)
    np.testing.assert_allclose(params[1][1].numpy(), before - 0.5 * grads[params[1][0]], rtol=1e-6)
    assert {name for name, _ in optimizer.state()} == {name for name in SHAPES if "qkv.weight" not in name}


def test_each_optimizer_gets_its_own_options():
    for name, option in (("Mine", "nu"), ("Other", "mu")):
        OPTIMIZERS.register(name, SGD, traits=OptimizerTraits(states=0, options=(option,)))
    group = {"kinds": ["bias"], "optimizer": "Other"}
    groups = optimizer_groups(section(name="Mine", groups=[group], options={"nu": 1, "mu": 2}))
    assert [one.rule.cfg.options for one in groups] == [{"mu": 2}, {"nu": 1}]


def test_a_parameter_that_no_group_takes_is_named():
    groups = [Group(kind, SGD(section()), lambda spec, kind=kind: spec.kind == kind) for kind in ("a", "b")]
    OPTIMIZERS.register("None", lambda cfg: groups, traits=OptimizerTraits(states=0))
    params = make_params(kind=lambda name: "matrix")
    with pytest.raises(ValueError, match=re.escape(params[0][0])):
        build_optimizer(section(name="None"), params)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Still, "keeps 2 states for each parameter, and was registered with OptimizerTraits(states=1)"),
        (dict, "must return an object of the type Rule"),
        (Rule, "which lacks update"),
        (lambda params, cfg: None, "does not take that: missing a required argument"),
        (lambda cfg: None, "must return an object of the type list. It returned None"),
        (lambda cfg: [], "returns no group of parameters"),
    ],
)
def test_an_optimizer_of_ones_own_is_what_it_was_registered_as(part, said):
    OPTIMIZERS.register("Own", part)
    with pytest.raises(ConfigError, match=r"Optimizer\.name = 'Own': .*" + re.escape(said)):
        build_optimizer(section(name="Own"), make_params())


def test_the_example_adafactor_is_its_formula():
    from examples.adafactor import Adafactor

    rng = np.random.default_rng(0)
    value, rows, columns = rng.normal(0, 0.02, (6, 4)), 0.0, 0.0
    own, square = paddle.to_tensor(value), paddle.zeros([6, 4], "float64")
    for step in range(4):
        gradient = rng.normal(0, 10.0 ** rng.integers(-3, 1), (6, 4))
        beta = 0.99 if step else 0.0
        rows = beta * rows + (1 - beta) * (gradient**2).mean(1)
        columns = beta * columns + (1 - beta) * (gradient**2).mean(0)
        change = gradient / np.sqrt(np.outer(rows, columns) / columns.mean())
        size = max(1e-3, np.sqrt((value**2).mean())) / max(1.0, np.sqrt((change**2).mean()))
        value = value - 0.1 * (0.5 * value + size * change)
        view = ParamView("w", None, own, paddle.to_tensor(gradient), {"square": square})
        Adafactor(section(beta2=0.99)).update([view], lr=0.1, weight_decay=0.5)
        np.testing.assert_allclose(own.numpy(), value, rtol=1e-9)
