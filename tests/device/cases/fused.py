"""In a rank: fused operators beside their composites."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import paddle

from ppfleetx.distributed import device as devices
from ppfleetx.distributed.device import backends, plugin_operator
from ppfleetx.nn import fused_ops
from ppfleetx.nn.flash import flash_obstacle
from ppfleetx.parallel import parallelize
from ppfleetx.utils.gpu_operators import registered_types
from tests.device.cases import training
from tests.device.cases.numbers import on
from tests.helpers.ascend import write_package


def judge(name: str, dtype: str, device: str) -> dict[str, str]:
    """What the trial of a row of the table says: "" when the operator gives what its composite gives; the
    first of its kernels that this build lacks; and why the card has no flash attention, where it is one."""
    row = fused_ops.TABLE[name]
    registered = paddle.base.core._get_registered_phi_kernels("function")
    lacks = [
        kernel
        for kernel in row.kernels
        if dtype not in registered_types(registered.get(kernel, ()), backends(device))
    ]
    fused_ops.forget_trials()
    with on(device, dtype):
        if not row.kernels and plugin_operator(row.of_plugin) is None:
            lacks.append(row.of_plugin)
        said, unfit = fused_ops.obstacles([name], [dtype])[name][dtype], None
        if any(kernel.startswith("flash") for kernel in row.kernels):
            query = paddle.zeros([1, 1, 1, 8, 64], dtype)
            unfit = flash_obstacle(query, paddle.nn.Dropout(0.0), has_documents=False)
    return {"said": said or "", "lacks": lacks[0] if lacks else "", "unfit": unfit or ""}


def train_with_a_plugin(**arguments: Any) -> dict[str, Any]:
    """``training:train_in_16_bits`` where the device's plugin has brought operators along, and which of them
    were taken; their trials are made in a process of their own."""
    taken: dict[str, Any] = {}
    choose = fused_ops.choose

    def noted(*args: Any) -> fused_ops.FusedOps:
        ops = choose(*args)
        taken.update({name: types for name, types in ops.taken.items() if fused_ops.TABLE[name].of_plugin})
        return ops

    with tempfile.TemporaryDirectory() as directory:
        write_package(Path(directory))
        sys.path.insert(0, directory)
        devices._operators_of_plugin.cache_clear()
        fused_ops.forget_trials()
        parallelize.choose = noted
        try:
            return {**training.train_in_16_bits(**arguments), "taken": taken}
        finally:
            parallelize.choose = choose
            sys.path.remove(directory)
            for name in [name for name in sys.modules if name.startswith("paddle_custom_device")]:
                del sys.modules[name]
            devices._operators_of_plugin.cache_clear()
            fused_ops.forget_trials()
