"""In a rank: fused operators beside their composites."""

from __future__ import annotations

import paddle

from ppfleetx.nn.fused import TABLE, obstacle
from ppfleetx.utils.gpu_operators import GPU_BACKENDS, registered_types


def judge(name: str, dtype: str, device: str) -> dict[str, str]:
    """What the trial of a row of the table says: "" when the operator gives what its composite gives; and
    the first of its kernels that this build lacks."""
    paddle.set_device(device)
    backends = GPU_BACKENDS if device == "gpu" else ("CPU",)
    registered = paddle.base.core._get_registered_phi_kernels("function")
    lacks = [
        kernel
        for kernel in TABLE[name].kernels
        if dtype not in registered_types(registered.get(kernel, ()), backends)
    ]
    return {"said": obstacle(name, dtype) or "", "lacks": lacks[0] if lacks else ""}
