"""Find out which device Paddle will use, and whether the device supports the configuration. Paddle is not
imported."""

from __future__ import annotations

import difflib
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.installed import FOR_GPUS
from ppfleetx.utils.machine import BFLOAT16, flags_in, read_cpuinfo

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig

CPU, GPU, XPU = "cpu", "gpu", "xpu"
"""Kinds of devices that Paddle's own builds support. All others need plugins."""
NPU = "npu"
"""The name of Ascend cards in their plugin."""
HALF_TYPES = ("float16", "bfloat16")
"""The 16-bit types in which a device may compute."""
_PLUGIN = "paddle-custom-"
PLUGINS_ROOT = "CUSTOM_DEVICE_ROOT"
"""Environment variable with a directory of plugins that Paddle loads. The name of a plugin's file usually,
but not always, contains the device's name."""
_PLUGINS_FOLDER = "paddle_custom_device"
# Patterns in Paddle's errors during its import.
_NOT_OPENED = re.compile(r"Fail to open library: (\S+) with error: (?:\1: )?(.*)")
_NO_SUCH_PLACE = "use wrong place"
_SELECTED = re.compile(r"FLAGS_selected_\w+")
_ON_THE_CPU = "run on the CPU with -o Global.device=cpu -o Engine.mix_precision.enable=False"


def cpu_obstacle(dtype: str) -> str | None:
    """Return the reason why this CPU cannot compute in ``dtype`` (``float16`` or ``bfloat16``); None if it
    can."""
    if dtype != "bfloat16":
        return f"on a CPU the 16-bit type is bfloat16, not {dtype}"
    if not BFLOAT16 & flags_in(read_cpuinfo()):
        return "this processor has no bfloat16 products (AVX512-BF16 or AMX)"
    return None


def not_supported_reasons(cfg: RunConfig, device: str) -> list[str]:
    """Return a sentence for each key of ``cfg`` whose value the device does not support. ``device`` is a kind
    of device, such as ``cpu``. Only 16-bit computation on a CPU is checked."""
    precision = cfg.Engine.mix_precision
    if device != "cpu" or precision.enable is not True:
        return []
    obstacle = cpu_obstacle(precision.dtype)
    if obstacle is None:
        return []
    return [
        f"Engine.mix_precision.enable = True: {obstacle}; -o Engine.mix_precision.enable=auto computes in "
        "float32 on such devices"
    ]


def expected_device(wanted: str, place: str | None = None) -> str:
    """Return the kind of device, such as ``gpu``, that the value ``wanted`` of ``Global.device`` selects.
    ``auto`` selects a card that the installed Paddle supports, or else the CPU. ``place`` is where the value
    was set, for the error message. Raises ConfigError if Paddle does not support the device."""
    cards = _kinds_of_cards()
    if wanted == "auto":
        return next(iter(cards), CPU)
    if may_support(wanted):
        return wanted
    raise ConfigError(
        f"the Paddle installed here supports {', '.join([*cards, CPU])} only. {how_to_get(wanted)}, or "
        f"{_ON_THE_CPU}",
        key="Global.device",
        value=wanted,
        place=place,
    )


def how_to_get(wanted: str) -> str:
    """Return advice on what to install for the kind of device ``wanted``, such as "Install paddlepaddle-xpu
    from Paddle's own package index". If ``wanted`` looks misspelled, the advice begins with "Did you mean".
    It has no final period, so that the caller can continue the sentence."""
    needed = {GPU: FOR_GPUS, XPU: "paddlepaddle-xpu from Paddle's own package index"}
    near = difflib.get_close_matches(wanted, ("auto", CPU, GPU, XPU, "npu"), n=1)
    meant = f"Did you mean {near[0]}? Else install" if near and near[0] != wanted else "Install"
    how = needed.get(
        wanted, f"the plugin for {wanted} ({_PLUGIN}{wanted}), or name its directory in {PLUGINS_ROOT}"
    )
    return f"{meant} {how}"


def refused_at_import(error: Exception) -> ConfigError | None:
    """Return an error that tells the user what to do about ``error``, which Paddle raised during its import.
    Covers plugins that do not load and cards that do not exist. Returns None for any other error."""
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
    """Return the error for a card that the launcher has assigned but that this machine does not have."""
    return ConfigError(
        "this process was given a card that this machine does not have or does not show: start as many "
        "processes as there are cards (--nproc)",
        key=variable,
        value=number,
        place="environment",
    )


def may_support(kind: str) -> bool:
    """Return False only if the installed Paddle certainly does not support the device ``kind``, and otherwise
    True."""
    is_here = kind == CPU or kind in _kinds_of_cards()
    # The user's own directory can have a plugin for any kind, and a Paddle that is not installed yet can
    # support any kind.
    return is_here or bool(os.environ.get(PLUGINS_ROOT)) or not _is_installed("paddlepaddle")


def device_for_recipe(kind: str) -> tuple[str, str]:
    """Return (value of ``Global.device``, note for the user) for a recipe written for cards of ``kind``. If
    the installed Paddle supports ``kind``, the value is ``kind`` and the note is empty. Otherwise, the value
    is ``auto``, and the note says why."""
    if may_support(kind):
        return kind, ""
    return "auto", f"the Paddle installed here does not support {kind}: any card it finds, else the CPU"


def _kinds_of_cards() -> list[str]:
    """Return the kinds of cards, such as ``gpu``, that the installed Paddle and its plugins support."""
    builds = [kind for kind in (GPU, XPU) if _is_installed(f"paddlepaddle-{kind}")]
    # Names of directories, because reading the metadata of all packages takes a tenth of a second.
    packages = (
        file.name for place in sys.path for file in Path(place).glob("[Pp]addle[_-][Cc]ustom[_-]*-info")
    )
    names = {re.split(r"-\d|\.(?:dist|egg)-info", name)[0].lower().replace("_", "-") for name in packages}
    plugins = Path(os.environ.get(PLUGINS_ROOT) or os.devnull).glob(f"lib{_PLUGIN}*.so")
    names |= {file.stem.removeprefix("lib") for file in plugins}
    return builds + sorted(name.removeprefix(_PLUGIN) for name in names if name.startswith(_PLUGIN))


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
