"""The device that Paddle will use, found without importing it."""

from __future__ import annotations

import os
from importlib import metadata

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.installed import FOR_GPUS

CPU, GPU, XPU = "cpu", "gpu", "xpu"
"""Kinds of devices that builds of Paddle serve by themselves. Others come with plugins."""
_PLUGIN = "paddle-custom-"
PLUGINS_ROOT = "CUSTOM_DEVICE_ROOT"
"""Environment variable with a directory of plugins that Paddle loads, under names that only they know."""
_ON_THE_CPU = "run on the CPU with -o Global.device=cpu -o Engine.mix_precision.enable=False"


def expected_device(wanted: str) -> str:
    """The device that ``Global.device`` will lead to, from what is installed.

    Raises:
        ConfigError: a kind of card is wanted that no installed build or plugin of Paddle serves.
    """
    cards = _kinds_of_cards()
    if wanted == "auto":
        return cards[0] if cards else CPU
    if wanted == CPU or wanted in cards or os.environ.get(PLUGINS_ROOT) or not _is_installed("paddlepaddle"):
        return wanted
    needed = {GPU: FOR_GPUS, XPU: "paddlepaddle-xpu from Paddle's own package index"}
    how = needed.get(wanted, f"its maker's plugin ({_PLUGIN}{wanted}; {PLUGINS_ROOT} names another place)")
    raise ConfigError(
        f"the Paddle installed here is the CPU build and finds no {wanted}; install {how}, or {_ON_THE_CPU}",
        key="Global.device",
        value=wanted,
    )


def _kinds_of_cards() -> list[str]:
    """Kinds of cards that an installed build or plugin serves, the first of which ``auto`` takes."""
    builds = [kind for kind in (GPU, XPU) if _is_installed(f"paddlepaddle-{kind}")]
    names = {str(one.metadata["Name"]).lower().replace("_", "-") for one in metadata.distributions()}
    return builds + sorted(name.removeprefix(_PLUGIN) for name in names if name.startswith(_PLUGIN))


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
