"""The device that Paddle will use, told without importing it."""

from __future__ import annotations

from importlib import metadata

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.installed import FOR_GPUS


def expected_device(wanted: str) -> str:
    """The device ``Global.device`` will lead to, told from the installed Paddle without importing it.

    Raises:
        ConfigError: a GPU is wanted, and Paddle's CPU build is what is installed.
    """
    has_gpu_build = _is_installed("paddlepaddle-gpu")
    if wanted == "auto":
        return "gpu" if has_gpu_build else "cpu"
    if wanted == "gpu" and not has_gpu_build and _is_installed("paddlepaddle"):
        raise ConfigError(
            f"the Paddle installed here is the CPU build; install {FOR_GPUS}, or run on the CPU with "
            "-o Global.device=cpu -o Engine.mix_precision.enable=False",
            key="Global.device",
            value=wanted,
        )
    return wanted


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
