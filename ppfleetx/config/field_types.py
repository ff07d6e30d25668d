"""The strict types of the fields of configuration sections.

Each type carries a :class:`Says`, which describes its values in messages and in ``docs/config.md``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

FLOAT_TEXT = re.compile(r"[-+]?(\d+(_\d+)*(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")
# Names of kinds of devices in lowercase, and what Paddle calls them. Other kinds are named by plugins.
_DEVICES = {name: name for name in ("auto", "cpu", "gpu", "xpu", "npu")} | {
    "cuda": "gpu",
    "rocm": "gpu",
    "ascend": "npu",
    "kunlun": "xpu",
}
MAX_COUNT = 2**63 - 1
"""The largest count: checkpoints and Paddle store counts in 64 bits."""
MAX_LAYERS = 10_000
"""The largest accepted number of layers. The deepest networks ever trained have about 1000."""
MAX_RANKS = 2**20
"""The largest number of processes of a job."""


@dataclass(frozen=True)
class Says:
    """The description of the values that a field type accepts, such as ``an integer of at least 1``."""

    words: str


def _float_from_text(value: Any) -> Any:
    """Validator that turns a string such as ``'2e-5'`` into a number. In YAML 1.1, ``2e-5`` is a string."""
    if isinstance(value, str) and FLOAT_TEXT.fullmatch(value.strip()):
        return float(value)
    return value


def _never(value: Any) -> Any:
    """Validator that turns an interval of 0 or less into None: both mean never."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return None if is_number and value <= 0 else value


def _zero_for_never(value: Any) -> Any:
    return 0 if value is None or _never(value) is None else value


def _usable_path(value: str) -> str:
    """Validator that puts the user's home directory for a leading ``~``, and refuses variables of a shell,
    except in the name of a file that exists."""
    if not value.strip():
        raise ValueError("of at least one character")
    path = os.path.expanduser(value)  # noqa: PTH111 (Path.expanduser raises RuntimeError for unknown users)
    if _VARIABLE.search(path) and not os.path.lexists(path):
        raise ValueError("(without variables such as $NAME, which only a shell replaces)")
    return path


def _kind_of_device(value: str) -> str:
    name, colon, _ = value.partition(":")
    kind = _DEVICES.get(name.lower(), name) or "gpu or npu"
    if value != kind:
        choose = "; the launcher's --devices chooses cards" if colon else ""
        raise ValueError(f"such as {kind}{choose}")
    return value


def _no_bool(value: Any) -> Any:
    """Validator that refuses booleans in fields whose choices are numbers, because True equals 1."""
    if isinstance(value, bool):
        raise ValueError("(a boolean is not a number)")
    return value


Text = Annotated[str, Field(strict=True), Says("a text")]
PathText = Annotated[str, Field(strict=True), AfterValidator(_usable_path), Says("a path")]
DeviceKind = Annotated[
    str, Field(strict=True), AfterValidator(_kind_of_device), Says("auto or a kind of device")
]
Bool = Annotated[bool, Field(strict=True), Says("true or false")]
Int = Annotated[int, Field(strict=True, ge=-MAX_COUNT, le=MAX_COUNT), Says("an integer")]
CountInt = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT), Says("an integer of at least 0")]
IntervalOrZero = Annotated[
    int,
    BeforeValidator(_zero_for_never),
    Field(strict=True, ge=0, le=MAX_COUNT),
    Says("an integer (0 or less, or null: never)"),
]
Interval = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT), Says("an integer (0 or less: never)")]
OptionalInterval = Annotated[Interval | None, BeforeValidator(_never)]
NumberChoice = BeforeValidator(_no_bool)
PositiveInt = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT), Says("an integer of at least 1")]
NumThreads = Annotated[int, Field(strict=True, ge=1, le=1024), Says("an integer from 1 to 1024")]
Degree = Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS), Says(f"an integer from 1 to {MAX_RANKS}")]
NumLayers = Annotated[
    int, Field(strict=True, ge=1, le=MAX_LAYERS), Says(f"an integer from 1 to {MAX_LAYERS}")
]
# Paddle's kernels use 32-bit indices along one dimension of a tensor.
MAX_SIZE = 2**31 - 1
Size = Annotated[int, Field(strict=True, ge=1, le=MAX_SIZE), Says("an integer of at least 1, below 2^31")]
# The random generator that shuffles samples takes 32-bit seeds.
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32), Says("an integer of at least 0, below 2^32")]
_LaxFloat = Annotated[float, BeforeValidator(_float_from_text)]
Float = Annotated[_LaxFloat, Field(strict=True, allow_inf_nan=False), Says("a number")]
PositiveFloat = Annotated[
    _LaxFloat, Field(strict=True, allow_inf_nan=False, gt=0), Says("a number greater than 0")
]
NonNegativeFloat = Annotated[
    _LaxFloat, Field(strict=True, allow_inf_nan=False, ge=0), Says("a number of at least 0")
]
FloatFromOne = Annotated[
    _LaxFloat, Field(strict=True, allow_inf_nan=False, ge=1), Says("a number of at least 1")
]
Fraction = Annotated[
    _LaxFloat, Field(strict=True, allow_inf_nan=False, ge=0, lt=1), Says("a number in [0, 1)")
]
PenaltyFactor = Annotated[
    _LaxFloat, Field(strict=True, allow_inf_nan=False, ge=0.01, le=100), Says("a number from 0.01 to 100")
]
UnitFloat = Annotated[
    _LaxFloat, Field(strict=True, allow_inf_nan=False, gt=0, le=1), Says("a number in (0, 1]")
]
