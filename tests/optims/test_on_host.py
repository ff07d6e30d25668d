"""Updates in host memory give the same numbers as updates on the device."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from ppfleetx.optims import adamw
from ppfleetx.optims.build import build_optimizer
from ppfleetx.optims.optimizer import UpdatePlace
from tests.optims.test_optimizer import make_params, section, set_grads


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_equal_to_the_update_in_place(name):
    params = [make_params() for _ in range(2)]
    plain, host = (
        build_optimizer(section(name=name), some, UpdatePlace(on_host=on_host))
        for some, on_host in zip(params, (False, True), strict=True)
    )
    places = [parameter.data_ptr() for _, parameter in params[1]]
    for step in range(1, 4):
        for some, optimizer in zip(params, (plain, host), strict=True):
            set_grads(some, np.random.default_rng(step))
            optimizer.step(1e-2 / step, 0.1 * step)
            optimizer.clear_grad()
    for (one, _), (other, _) in zip(plain.state().items(), host.state().items(), strict=True):
        assert one == other
    for key, state in plain.state().items():
        assert np.array_equal(host.state()[key].numpy(), state.numpy()), key
    for (key, one), (_, other) in zip(*params, strict=True):
        assert np.array_equal(one.numpy(), other.numpy()), key
    assert places == [parameter.data_ptr() for _, parameter in params[1]], "others hold the old memory"


def test_masters_are_updated_and_rounded_into_16_bits():
    """The masters equal float32 parameters after each step."""
    exact, low = make_params(), make_params()
    masters = {name: parameter.detach().clone() for name, parameter in low}
    low = [(name, as_bfloat16(parameter)) for name, parameter in low]
    expected = build_optimizer(section(), exact)
    optimizer = build_optimizer(section(), low, UpdatePlace(multi_precision=True, on_host=True))
    optimizer.keep_masters(masters)
    for step in range(1, 4):
        grads = set_grads(exact, np.random.default_rng(step))
        for name, parameter in low:
            parameter.main_grad = paddle.to_tensor(grads[name])
        for each in (expected, optimizer):
            each.step(1e-2, 0.1)
            each.clear_grad()
    state = optimizer.state()
    for (name, parameter), (_, rounded) in zip(exact, low, strict=True):
        assert np.array_equal(state[name, "master_weight"].numpy(), parameter.numpy()), name
        assert rounded.dtype == paddle.bfloat16
        assert np.array_equal(rounded.numpy(), parameter.astype("bfloat16").numpy()), name
        for key in ("moment1", "moment2", "beta1_pow", "beta2_pow"):
            assert np.array_equal(state[name, key].numpy(), expected.state()[name, key].numpy()), (name, key)


def as_bfloat16(parameter):
    low = parameter.detach().astype("bfloat16")
    parameter.value().get_tensor()._share_data_with(low.value().get_tensor())
    return parameter


def test_states_and_rate_are_made_on_the_host_and_the_device_comes_back(monkeypatch):
    """With a simulated GPU, record the current device whenever a tensor is made or the kernel runs."""
    current, seen = ["gpu:0"], []
    monkeypatch.setattr(paddle, "get_device", lambda: current[-1])
    monkeypatch.setattr(paddle, "set_device", current.append)
    full, update = paddle.full, adamw._C_ops.adamw_
    monkeypatch.setattr(paddle, "full", lambda *args: (seen.append(current[-1]), full(*args))[1])
    operators = SimpleNamespace(adamw_=lambda *args: (seen.append(current[-1]), update(*args))[1])
    monkeypatch.setattr(adamw, "_C_ops", operators)
    params = make_params()
    optimizer = build_optimizer(section(), params, UpdatePlace(on_host=True))
    optimizer.state()
    assert current[-1] == "gpu:0" and len(seen) == 4 * len(params)
    set_grads(params, np.random.default_rng(0))
    optimizer.step(1.25e-2, 0.1)
    assert current[-1] == "gpu:0" and len(seen) == (4 + 1) * len(params) + 1
    assert set(seen) == {"cpu"}
