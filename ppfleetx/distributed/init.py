"""Choose the device and make the process's :class:`ParallelContext`."""

from __future__ import annotations

import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections import RunConfig
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.random import seed_everything


def init_distributed(cfg: RunConfig) -> ParallelContext:
    """Set Paddle's device and seeds for this process.

    Raises:
        ConfigError: ``Global.device`` names a device this machine or this Paddle does not have.
    """
    device = choose_device(cfg.Global.device)
    paddle.set_device(device)
    if cfg.Global.flags:
        paddle.set_flags(dict(cfg.Global.flags))
    seed_everything(cfg.Global.seed)
    return ParallelContext.single(device)


def choose_device(wanted: str) -> str:
    """``gpu``, ``cpu`` or ``auto`` as a Paddle device name."""
    has_gpu = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    if wanted == "auto":
        return "gpu" if has_gpu else "cpu"
    if wanted == "gpu" and not has_gpu:
        why = "there is no GPU" if paddle.is_compiled_with_cuda() else "this is Paddle's CPU build"
        raise ConfigError(
            f"{why}; on a CPU give -o Global.device=cpu -o Engine.mix_precision.enable=False",
            key="Global.device",
            value=wanted,
        )
    return wanted
