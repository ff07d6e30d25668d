"""The whole examination: what this process finds by itself, joined with what the others find."""

from __future__ import annotations

from collections.abc import Sequence

from ppfleetx.doctor.case import Case
from ppfleetx.doctor.registry import CHECKS, Check, examine
from ppfleetx.doctor.rows import Row


def examine_all(case: Case, checks: Sequence[Check] = CHECKS) -> list[Row]:
    """The rows of every check that is this process's to make."""
    return [row for check in checks if check.is_for(case) for row in examine(check, case)]
