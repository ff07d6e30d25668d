"""A progress bar on terminals, and silence elsewhere."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any, Literal, Self


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
        self._above = contextlib.ExitStack()
        if sys.stderr.isatty() if show == "auto" else show:
            self._progress = _make_progress(unit)
            self._task = self._progress.add_task(description, total=total, completed=completed, text="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
            # Lines for a file or a pipe must reach it; only a terminal's own lines are drawn above the bar.
            if sys.stdout.isatty():
                above = _AboveBar(self._progress.console)
                self._above.enter_context(contextlib.redirect_stdout(above))
                self._above.callback(above.finish)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._above.close()
            self._progress.stop()

    def advance(self, amount: float, text: str | None = None) -> None:
        """Add ``amount``; ``text`` replaces the words at the end of the line."""
        if self._progress is None:
            return
        if text is None:
            self._progress.update(self._task, advance=amount)
        else:
            self._progress.update(self._task, advance=amount, text=text)


class _AboveBar:
    """Standard output while the bar is drawn: whole lines go above it, as long as they are.

    ``rich`` would do the same, but cut lines at the terminal's width.
    """

    def __init__(self, console: Any) -> None:
        from rich.ansi import AnsiDecoder

        self._console, self._stream, self._begun = console, sys.stdout, ""
        self._decode = AnsiDecoder().decode_line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._console.print(self._decode(line), soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        """A line that has only begun stays here until it ends."""

    def finish(self) -> None:
        """Write a line that has not ended."""
        if self._begun:
            self.write("\n")


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
        redirect_stdout=False,
        redirect_stderr=False,
    )
