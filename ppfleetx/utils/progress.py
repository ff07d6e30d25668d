"""A progress bar on terminals, and silence elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Literal, Self


class ProgressBar:
    """A ``rich`` bar: description, share, rate, time left, and a free text that changes.

    Args:
        description: the words in front.
        total: the amount at which the bar is full; None where it is unknown.
        unit: what is counted, e.g. ``step`` or ``MB``.
        show: "auto" draws on a terminal only.
    """

    def __init__(
        self,
        description: str,
        *,
        total: float | None,
        unit: str,
        completed: float = 0,
        show: bool | Literal["auto"] = "auto",
    ) -> None:
        self._progress = None
        if sys.stderr.isatty() if show == "auto" else show:
            self._progress = _make_progress(unit)
            self._task = self._progress.add_task(description, total=total, completed=completed, text="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, amount: float, text: str | None = None) -> None:
        """Add ``amount``; ``text`` replaces the words at the end of the line."""
        if self._progress is None:
            return
        if text is None:
            self._progress.update(self._task, advance=amount)
        else:
            self._progress.update(self._task, advance=amount, text=text)


def _make_progress(unit: str):  # rich is imported here only: --help stays quick
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.2f} {unit}/s")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
        console=Console(file=sys.stderr),
        refresh_per_second=4,
        # Lines for a file or a pipe must reach it; only a terminal's own lines are drawn above the bar.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=False,
    )
