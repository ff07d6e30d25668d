"""How long the processes of a job wait for each other when it starts."""

from __future__ import annotations

import math
import os

from ppfleetx.config.errors import ConfigError

START_VARIABLE = "PPFLEETX_START_TIMEOUT"
_START_SECONDS = 600.0


def start_timeout() -> float:
    """Seconds that the nodes, and then the ranks, of a job may start apart (``PPFLEETX_START_TIMEOUT``, 600).

    Raises:
        ConfigError: the variable is not a positive number.
    """
    return seconds_in(START_VARIABLE, _START_SECONDS, least=1.0)


def seconds_in(variable: str, default: float, *, least: float = 0.0) -> float:
    """The seconds an environment variable sets; 0 is allowed where ``least`` is 0.

    Raises:
        ConfigError: it is no number, or less than ``least``.
    """
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not least <= seconds < math.inf:
        rule = f"not a number of seconds, {least:g} or more" + ("" if least else " (0: no limit)")
        raise ConfigError(rule, key=variable, value=text, place="environment")
    return seconds
