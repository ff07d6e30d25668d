"""The device that Paddle will use, found without importing it."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.installed import FOR_GPUS

CPU, GPU, XPU = "cpu", "gpu", "xpu"
"""Kinds of devices that builds of Paddle serve by themselves. Others come with plugins."""
NPU = "npu"
"""What the plugin for Ascend cards calls them."""
_PLUGIN = "paddle-custom-"
PLUGINS_ROOT = "CUSTOM_DEVICE_ROOT"
"""Environment variable with a directory of plugins that Paddle loads. Names of their files usually, but not
always, say which device they are for."""
_ON_THE_CPU = "run on the CPU with -o Global.device=cpu -o Engine.mix_precision.enable=False"


def expected_device(wanted: str) -> str:
    """The device that ``Global.device`` will lead to, from what is installed.

    Raises:
        ConfigError: a kind of card is wanted that no installed build or plugin of Paddle serves.
    """
    if wanted == "auto":
        return next(iter(_kinds_of_cards()), CPU)
    if is_served(wanted):
        return wanted
    needed = {GPU: FOR_GPUS, XPU: "paddlepaddle-xpu from Paddle's own package index"}
    how = needed.get(wanted, f"its maker's plugin ({_PLUGIN}{wanted}; {PLUGINS_ROOT} names another place)")
    raise ConfigError(
        f"the Paddle installed here is the CPU build and finds no {wanted}; install {how}, or {_ON_THE_CPU}",
        key="Global.device",
        value=wanted,
    )


def is_served(kind: str) -> bool:
    """Whether what is installed here may serve a kind of device; where no Paddle is, any may be served."""
    is_here = kind == CPU or kind in _kinds_of_cards()
    return is_here or bool(os.environ.get(PLUGINS_ROOT)) or not _is_installed("paddlepaddle")


def of_recipe(kind: str) -> tuple[str, str]:
    """``Global.device`` for a recipe that names a kind of card, and why it is another: recipes for cards that
    the Paddle installed here cannot serve run on what there is."""
    if is_served(kind):
        return kind, ""
    return "auto", f"the Paddle installed here serves no {kind}: whatever card it finds, else the CPU"


def _kinds_of_cards() -> list[str]:
    """Kinds of cards that an installed build or plugin serves, the first of which ``auto`` takes."""
    builds = [kind for kind in (GPU, XPU) if _is_installed(f"paddlepaddle-{kind}")]
    names = {str(one.metadata["Name"]).lower().replace("_", "-") for one in metadata.distributions()}
    plugins = Path(os.environ.get(PLUGINS_ROOT) or os.devnull).glob(f"lib{_PLUGIN}*.so")
    names |= {file.stem.removeprefix("lib") for file in plugins}
    return builds + sorted(name.removeprefix(_PLUGIN) for name in names if name.startswith(_PLUGIN))


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
