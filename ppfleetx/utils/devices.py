"""The device that Paddle will use, found without importing it."""

from __future__ import annotations

import difflib
import os
import re
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
_PLUGINS_FOLDER = "paddle_custom_device"
# Of Paddle's errors while it is imported.
_NOT_OPENED = re.compile(r"Fail to open library: (\S+) with error: (?:\1: )?(.*)")
_NO_SUCH_PLACE = "use wrong place"
_SELECTED = re.compile(r"FLAGS_selected_\w+")
_ON_THE_CPU = "run on the CPU with -o Global.device=cpu -o Engine.mix_precision.enable=False"


def expected_device(wanted: str, place: str | None = None) -> str:
    """The device that ``Global.device`` will lead to, from what is installed.

    Args:
        place: where it was written, for the message.

    Raises:
        ConfigError: a kind of card is wanted that no installed build or plugin of Paddle serves.
    """
    cards = _kinds_of_cards()
    if wanted == "auto":
        return next(iter(cards), CPU)
    if is_served(wanted):
        return wanted
    raise ConfigError(
        f"the Paddle installed here serves {', '.join([*cards, CPU])} only. {how_to_get(wanted)}, or "
        f"{_ON_THE_CPU}",
        key="Global.device",
        value=wanted,
        place=place,
    )


def how_to_get(wanted: str) -> str:
    """What to do where Paddle does not serve this kind of device, as the beginning of a sentence."""
    needed = {GPU: FOR_GPUS, XPU: "paddlepaddle-xpu from Paddle's own package index"}
    near = difflib.get_close_matches(wanted, ("auto", CPU, GPU, XPU, "npu"), n=1)
    meant = f"Did you mean {near[0]}? Else install" if near and near[0] != wanted else "Install"
    how = needed.get(
        wanted, f"the plugin for {wanted} ({_PLUGIN}{wanted}), or name its directory in {PLUGINS_ROOT}"
    )
    return f"{meant} {how}"


def refused_at_import(error: Exception) -> ConfigError | None:
    """What it means that Paddle does not start because of a device; None: it is something else."""
    if found := _NOT_OPENED.search(str(error)):
        return ConfigError(
            f"this plugin of Paddle does not load: {found[2].strip()}. Install it again for this version of "
            f"Paddle, or remove it ({PLUGINS_ROOT} names it, or it is installed in {_PLUGINS_FOLDER})",
            place=found[1],
        )
    chosen = {name: value for name, value in os.environ.items() if _SELECTED.fullmatch(name) and value}
    if _NO_SUCH_PLACE in str(error) and chosen:
        name, value = next(iter(chosen.items()))
        return no_such_card(name, value)
    return None


def no_such_card(variable: str, number: str) -> ConfigError:
    """The error of a process that was given a card that is not there."""
    return ConfigError(
        "this process was given a card that this machine does not have or does not show: start as many "
        "processes as there are cards (--nproc)",
        key=variable,
        value=number,
        place="environment",
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
