"""In a rank: fused operators beside their composites."""

from __future__ import annotations

import paddle

from ppfleetx.nn import fused
from ppfleetx.nn.flash import flash_obstacle
from ppfleetx.utils.gpu_operators import GPU_BACKENDS, registered_types
from tests.device.cases.numbers import on


def judge(name: str, dtype: str, device: str) -> dict[str, str]:
    """What the trial of a row of the table says: "" when the operator gives what its composite gives; the
    first of its kernels that this build lacks; and why the card has no flash attention, where it is one."""
    row, backends = fused.TABLE[name], GPU_BACKENDS if device == "gpu" else (device,)
    registered = paddle.base.core._get_registered_phi_kernels("function")
    lacks = [
        kernel
        for kernel in row.kernels
        if dtype not in registered_types(registered.get(kernel, ()), backends)
    ]
    fused.forget_trials()
    with on(device, dtype):
        said, unfit = fused.obstacles([name], [dtype])[name][dtype], None
        if any(kernel.startswith("flash") for kernel in row.kernels):
            query = paddle.zeros([1, 1, 1, 8, 64], dtype)
            unfit = flash_obstacle(query, paddle.nn.Dropout(0.0), packed=False)
    return {"said": said or "", "lacks": lacks[0] if lacks else "", "unfit": unfit or ""}
