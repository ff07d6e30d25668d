"""The checks of ``ppfleetx doctor`` that a process runs without the other processes of the job, in the order
in which they run.

A check is a function that takes a :class:`~ppfleetx.doctor.results.Target` and yields
:class:`~ppfleetx.doctor.results.Row` objects. The module of a check is imported only when the check runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec

from ppfleetx.config.errors import UserError
from ppfleetx.distributed.device import count, is_card, kind_of
from ppfleetx.doctor.results import Row, Target, fail, skipped, within

_LEAST_PATIENCE = 30.0  # seconds; long, because machines are busy when jobs start


class Need(Enum):
    NOTHING = "nothing"
    CONFIG = "a configuration"
    PADDLE = "Paddle"
    CARD = "a card"


class Each(Enum):
    RANK = "every process"
    NODE = "the first process of each node"
    CARD = "every process that has a card, and of the others the first of each node"


@dataclass(frozen=True)
class Check:
    """One check of ``ppfleetx doctor``.

    Attributes:
        group: the heading in the report.
        module, function: where the check is defined.
        title: the name of the report row if the check itself cannot run.
        need: what the check requires, such as a configuration or a card.
        each: the processes that run the check, such as the first process of each machine.
        seconds: the time limit. ``Target.patience`` can lower it. None: no limit, because the check only
            computes.
    """

    group: str
    module: str
    function: str
    title: str
    need: Need = Need.NOTHING
    each: Each = Each.NODE
    seconds: float | None = None

    def is_for(self, target: Target) -> bool:
        everyone = self.each is Each.RANK or (self.each is Each.CARD and is_card(target.device))
        return everyone or target.local_rank == 0

    @property
    def imports_paddle(self) -> bool:
        return self.need in (Need.PADDLE, Need.CARD)

    def load(self) -> Callable[[Target], Iterable[Row]]:
        return getattr(importlib.import_module(f"ppfleetx.doctor.{self.module}"), self.function)


CHECKS: tuple[Check, ...] = (
    Check("environment", "environment", "versions", "versions"),
    Check("environment", "environment", "machine", "machine"),
    Check("environment", "environment", "limits", "limits"),
    Check("environment", "environment", "variables", "variables", each=Each.RANK),
    Check("configuration", "configuration", "plan", "plan", Need.CONFIG),
    Check("configuration", "configuration", "start", "start", Need.CONFIG, seconds=30.0),
    Check("files", "files", "data", "data", Need.CONFIG, seconds=300.0),
    Check("files", "files", "tokenizer", "tokenizer", Need.CONFIG, seconds=120.0),
    Check("files", "files", "checkpoints", "checkpoints", Need.CONFIG, seconds=60.0),
    Check("storage", "files", "output_directory", "output directory", Need.CONFIG, seconds=120.0),
    Check("storage", "files", "room", "room", Need.CONFIG, seconds=30.0),
    Check("environment", "environment", "paddle_loads", "import paddle", Need.PADDLE, Each.RANK),
    Check("environment", "libraries", "libraries", "libraries", each=Each.RANK),
    Check("configuration", "configuration", "memory", "memory", Need.CONFIG, Each.CARD),
    Check("network", "network", "network", "interfaces"),
    Check("operators", "operators", "registered", "registered kernels", Need.PADDLE),
    Check("losses", "golden_losses", "losses", "losses", Need.PADDLE, Each.CARD),
    Check("card", "card", "driver", "driver", Need.CARD, seconds=30.0),
    Check("card", "card", "card", "card", Need.CARD, Each.RANK),
    Check("card", "card", "small_operators", "operators", Need.CARD, Each.RANK),
)
"""All checks that a process runs without the other processes, in order."""


def examine(check: Check, target: Target) -> list[Row]:
    """Run a check within its time limit, and return its report rows. If the check cannot run, exceeds its
    limit or raises an error, the result is one row with the reason."""
    reason = obstacle(check, target)
    rows = [skipped(check.title, reason)] if reason else _run(check, target)
    return [replace(row, group=row.group or check.group) for row in rows]


def obstacle(check: Check, target: Target) -> str:
    """Return the reason why a check cannot run in this process, such as a missing card; "" if the check can
    run."""
    if check.need is Need.CONFIG and target.cfg is None:
        return (
            "the configuration could not be read" if target.found else "no configuration was given (-c FILE)"
        )
    if check.imports_paddle and find_spec("paddle") is None:
        return "Paddle is not installed"
    if check.need is Need.CARD and not is_card(target.device):
        return "there is no card here: the device is the CPU"
    if check.need is Need.CARD and not count(kind_of(target.device)):
        return "Paddle sees no card"
    return ""


def _run(check: Check, target: Target) -> list[Row]:
    if check.seconds is None:
        return _run_without_limit(check, target)
    limit = min(check.seconds, max(target.patience, _LEAST_PATIENCE))
    try:
        return within(limit, lambda: _run_without_limit(check, target))
    except TimeoutError:
        return [
            fail(
                check.title,
                f"no answer within {limit:.0f} s",
                "a file system, a name server or a driver does not answer: try it by hand "
                "(ls, getent hosts, nvidia-smi)",
            )
        ]


def _run_without_limit(check: Check, target: Target) -> list[Row]:
    """Run a check without a time limit, and return its report rows. If the check raises an error, the result
    is one row with the error's message."""
    try:
        return list(check.load()(target))
    except UserError as error:
        return [fail(check.title, str(error), "correct what the message names")]
    except Exception as error:  # noqa: BLE001  (whatever Paddle, a driver or a file system raises is a finding)
        return [
            fail(
                check.title,
                f"{type(error).__name__}: {_first_lines(error)}",
                "the operation itself failed: the text is the library's own",
            )
        ]


def _first_lines(error: Exception) -> str:
    """Return the first lines of an error's message, without the C++ stack trace that Paddle puts first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    summary = next((i for i, line in enumerate(lines) if line.startswith("Error Message Summary")), -1)
    text = [line for line in lines[summary + 1 :] if not set(line) <= {"-"}]
    return " ".join(text[:3])[:400]
