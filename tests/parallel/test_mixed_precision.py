"""Loss scaling against a table of rules, devices without 16-bit kernels, and float32 master weights."""

import itertools

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.engine import MixedPrecisionConfig
from ppfleetx.config.sections.optimizer import OptimizerConfig
from ppfleetx.optims.build import build_optimizer
from ppfleetx.optims.gradients import add_to_main_gradient, drop_gradient, gradient_of
from ppfleetx.optims.optimizer import UpdatePlace
from ppfleetx.parallel.mixed_precision import LossScaler, Precision
from tests.helpers.low_precision import emulated
from tests.parity.training import build, take_step


def megatron(scale, window, hysteresis, overflows, minimum=1.0):
    """Megatron-LM's rules, implemented independently: the loss scale after each step."""
    growth, left = 0, hysteresis
    for overflow in overflows:
        if overflow:
            growth, left = 0, left - 1
            if left <= 0:
                scale = max(scale * 0.5, minimum)
        else:
            growth += 1
            if growth == window:
                growth, left, scale = 0, hysteresis, scale * 2
        yield scale


@pytest.mark.parametrize(("window", "hysteresis"), [(1, 1), (2, 2), (3, 1), (3, 3), (1000, 2)])
def test_every_sequence_of_ten_steps(window, hysteresis):
    for overflows in itertools.product([False, True], repeat=10):
        scaler = LossScaler(8.0, window, hysteresis)
        given = []
        for overflow in overflows:
            scaler.update(overflow)
            given.append(scaler.scale)
        assert given == list(megatron(8.0, window, hysteresis, overflows))


@pytest.mark.parametrize(("scale", "can_shrink", "smallest"), [(2.0, True, 1.0), (0.25, False, 0.25)])
def test_the_smallest_scale(scale, can_shrink, smallest):
    scaler = LossScaler(scale, hysteresis=1)
    assert scaler.can_shrink == can_shrink
    scaler.update(True)
    assert scaler.scale == smallest and not scaler.can_shrink


def test_a_shorter_window_of_a_resumed_run_counts():
    """Otherwise the scale would not grow before the next overflow."""
    before = LossScaler(64.0, window=1000)
    for _ in range(500):
        before.update(False)
    resumed = LossScaler(64.0, window=200)
    resumed.load_state(before.state())
    resumed.update(False)
    assert resumed.scale == 128.0


def test_a_smaller_hysteresis_of_a_resumed_run_counts():
    """Otherwise the first overflow would still be tolerated."""
    resumed = LossScaler(64.0, hysteresis=1)
    resumed.load_state(LossScaler(64.0, hysteresis=4).state())
    resumed.update(True)
    assert resumed.scale == 32.0


def test_a_constant_scale():
    scaler = LossScaler(128.0, window=1, hysteresis=1, dynamic=False)
    for overflow in (True, False, True):
        scaler.update(overflow)
    assert scaler.scale == 128.0 and not scaler.can_shrink
    scaler.load_state({"scale": 2.0, "quiet_steps": 0, "tolerated": 0})
    assert scaler.scale == 128.0


def test_a_restored_scaler_goes_on_as_if_never_stopped():
    rng = np.random.default_rng(3)
    overflows = (rng.random(200) < 0.15).tolist()
    whole, first = LossScaler(2.0**10, 5, 2), LossScaler(2.0**10, 5, 2)
    for step, overflow in enumerate(overflows):
        whole.update(overflow)
        first.update(overflow)
        if step % 7 == 0:
            second = LossScaler(64.0, 5, 2)
            second.load_state(first.state())
            first = second
        assert first.state() == whole.state()


def test_the_scaler_is_float16s():
    assert Precision().scaler is None and Precision().loss_scale == 1.0
    assert not Precision().lowers_parameters


def test_a_device_without_kernels_is_refused():
    """Paddle would warn and compute in float32."""
    with pytest.raises(ConfigError, match=r"does not compute in float16.*mix_precision\.enable=False"):
        Precision(MixedPrecisionConfig(enable=True, dtype="float16"))


def test_an_operation_is_in_one_list():
    with pytest.raises(ValueError, match="softmax"):
        MixedPrecisionConfig(custom_white_list=["softmax"], custom_black_list=["softmax", "mean"])


def lowered(values):
    parameter = paddle.create_parameter([len(values)], "float32")
    parameter.set_value(np.asarray(values, np.float32))
    low = parameter.detach().astype("float16")
    master = parameter.detach().clone()
    parameter.value().get_tensor()._share_data_with(low.value().get_tensor())
    return parameter, master


def test_main_gradients_are_summed_in_float32():
    """A float16 sum of 4096 ones would stop at 2048."""
    parameter, _ = lowered([1.0])
    parameter._register_backward_hook(lambda *_: add_to_main_gradient(parameter))
    for _ in range(4096):
        parameter.astype("float32").sum().backward()
    assert gradient_of(parameter).dtype == paddle.float32
    assert gradient_of(parameter).item() == 4096.0
    assert parameter.grad is None
    drop_gradient(parameter)
    assert gradient_of(parameter) is None


def test_sgd_moves_the_master_and_rounds_it_into_the_parameter():
    parameter, master = lowered([1.0, -2.0])
    place = UpdatePlace(multi_precision=True)
    optimizer = build_optimizer(OptimizerConfig(name="SGD"), [("w", parameter)], place)
    optimizer.keep_masters({"w": master})
    step = 2.0**-13  # below half of float16's spacing at 1: lost without a master
    for count in range(1, 9):
        parameter.main_grad = paddle.to_tensor([1.0, 1.0])
        optimizer.step(lr=step)
        optimizer.clear_grad()
        np.testing.assert_array_equal(master.numpy(), np.float32([1.0, -2.0]) - np.float32(count * step))
        np.testing.assert_array_equal(parameter.numpy(), master.numpy().astype(np.float16))
    assert parameter.numpy()[0] != 1.0


def test_a_step_is_repeated_with_its_own_loss_scale():
    """Spike replay compares bits, so the scale may change only after the repetition."""
    mixed = {"enable": True, "dtype": "float16", "level": "O1", "scale_loss": 8.0, "incr_every_n_steps": 1}
    keys = {f"Engine.mix_precision.{key}": value for key, value in mixed.items()}
    with emulated():
        cfg, ctx, runner = build({}, 1, "gpt", "sgd", 8, {"Model.num_layers": 1, **keys})
        seen = []

        def judge(loss, grad_norm, repeat):
            scale = runner._precision.loss_scale
            seen.append((repeat() == (loss, grad_norm), scale))
            return loss, grad_norm, True

        runner.judge = judge
        for step in range(2):
            take_step(runner, step, cfg, ctx)
    assert seen == [(True, 8.0), (True, 16.0)]
