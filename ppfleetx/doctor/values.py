"""Variables of the environment that nobody knows, or whose value nobody can read: they have no effect."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ppfleetx.doctor.case import Case
from ppfleetx.doctor.rows import Row, fail, warn

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_COUNTS = re.compile(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*")
_TRUTH = ("0", "1", "true", "false", "t", "f", "yes", "no", "y", "n")
_OF_LAUNCHER = ("FLAGS_selected_", "FLAGS_START_PORT", "FLAGS_FIXED_PORT", "FLAGS_logtostderr")


def threads(case: Case) -> Iterator[Row]:
    """Rows of numbers of threads that are none; looked at before ppfleetx sets its own."""
    for name in _THREADS:
        value = case.environ.get(name, "1")
        if not _COUNTS.fullmatch(value):
            told = fail if value.strip() else warn  # an empty one is passed over
            yield told(
                name, f"{value!r} is no number of threads", f"{name}=N, a whole number; or unset {name}"
            )


def values(case: Case) -> Iterator[Row]:
    """Rows of Paddle's flags that are wrong; none where none is."""
    given = {name: value for name, value in case.environ.items() if name.startswith("FLAGS_")}
    if given:
        from paddle.base import core

        flags = core.globals()
        yield from flag_rows(given, {name: flags[name] for name in flags.keys()})  # noqa: SIM118


def flag_rows(given: Mapping[str, str], known: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of flags that are wrong.

    Args:
        given: by name, of the environment.
        known: Paddle's flags and their values.
    """
    for name, value in sorted(given.items()):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"{name} is spelt {near[0]}, or " if near else ""
            if not name.startswith(_OF_LAUNCHER):
                text = "Paddle's core has no such flag: it has no effect unless Python code asks for it"
                yield warn(name, text, f"{hint}unset {name} where nothing needs it")
        elif wish := _wish(value, known[name]):
            yield fail(
                name, f"{value!r} is not {wish}: Paddle passes it over", f"set it to {wish}, or unset it"
            )


def _wish(value: str, there: Any) -> str:
    """What kind of value a flag wants; empty where it has one."""
    if isinstance(there, bool):
        return "" if value.lower() in _TRUTH else "true or false"
    if isinstance(there, (int, float)):
        try:
            float(value)
        except ValueError:
            return "a number"
    return ""
