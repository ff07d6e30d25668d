"""What a run reports, kept in a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppfleetx.core.engine.callbacks.base import Callback
from ppfleetx.core.engine.run import EvalRecord, Run, StepRecord


class History(Callback):
    """Appends a dictionary for each step and each evaluation.

    Args:
        records: the list.
        names: attributes of the records that are kept, where a record has them.
    """

    def __init__(self, records: list[dict[str, Any]], names: Sequence[str]) -> None:
        self._records, self._names = records, names

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._records.append(self._kept("train", record))

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        named = {} if record.name is None else {"set": record.name}
        self._records.append({**self._kept("eval", record), **named})

    def _kept(self, kind: str, record: StepRecord | EvalRecord) -> dict[str, Any]:
        values = {name: getattr(record, name) for name in self._names if hasattr(record, name)}
        return {"kind": kind, **values}
