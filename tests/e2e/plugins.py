"""Run in the ranks: training with a plugin, and steps of a plugin's optimizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from tests.e2e import program


def use(folder: str, plugin: str) -> None:
    """Import the plugin from ``folder``, as ``--plugin`` does."""
    from ppfleetx.config.registry import PLUGINS_VARIABLE, imported_plugins
    from ppfleetx.utils.plugins import import_named_plugins

    if folder not in sys.path:
        sys.path.append(folder)
    # As in a new process: without those of the runs before.
    imported_plugins.clear()
    os.environ.pop(PLUGINS_VARIABLE, None)
    import_named_plugins([plugin])


def train(values: Mapping[str, Any], world: int, folder: str, plugin: str) -> str:
    """Run tools/train.py; the user's error that it ended with, or ""."""
    use(folder, plugin)
    return program.error_of(program.train, values, world)


def lion_steps(folder: str, precision: str, on_host: bool) -> dict[str, Any]:
    """Three steps of the optimizer Lion on a matrix and a bias; their values and states."""
    import numpy as np
    import paddle

    from ppfleetx.config.sections.optimizer import OptimizerConfig
    from ppfleetx.optims.build import build_optimizer
    from ppfleetx.optims.optimizer import UpdatePlace

    use(folder, "lion")
    rng = np.random.default_rng(0)
    starts = {"a.weight": rng.standard_normal((3, 4)), "a.bias": rng.standard_normal(4)}
    parameters, masters = {}, {}
    for name, start in starts.items():
        parameter = paddle.create_parameter(list(start.shape), "float32")
        parameter.set_value(start.astype("float32"))
        if precision != "float32":
            masters[name] = parameter.detach().clone()
            low = parameter.detach().astype(precision)
            low.name, low.stop_gradient = parameter.name, False
            parameter = low
        parameters[name] = parameter
    optimizer = build_optimizer(
        OptimizerConfig(name="Lion", beta1=0.9, beta2=0.99),
        list(parameters.items()),
        UpdatePlace(multi_precision=precision != "float32", on_host=on_host),
    )
    optimizer.keep_masters(masters)
    gradients = []
    for step in range(1, 4):
        gradients.append({name: rng.standard_normal(v.shape).astype("float32") for name, v in starts.items()})
        for name, parameter in parameters.items():
            if precision == "float32":
                parameter.grad = paddle.to_tensor(gradients[-1][name])
            else:
                parameter.main_grad = paddle.to_tensor(gradients[-1][name])
        optimizer.step(0.01 * step, 0.1)
        optimizer.clear_grad()
    return {
        "starts": {name: value.tolist() for name, value in starts.items()},
        "gradients": [{name: value.tolist() for name, value in of.items()} for of in gradients],
        "values": {name: p.astype("float32").numpy().tolist() for name, p in parameters.items()},
        "states": {"/".join(key): t.numpy().tolist() for key, t in optimizer.state().items()},
    }
