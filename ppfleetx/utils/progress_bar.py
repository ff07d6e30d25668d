"""A progress bar for terminals and notebooks. If the output goes to a file or a pipe, no bar is shown."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self, TypeVar

ItemT = TypeVar("ItemT")

_REDRAWS_PER_SECOND = 4


class ProgressBar:
    """A progress bar on one line: description, percentage, rate, time left, and at the end a string that
    :meth:`advance` can change."""

    def __init__(
        self,
        description: str,
        *,
        total: float | None,
        unit: str,
        completed: float = 0,
        show: bool | Literal["auto"] = "auto",
    ) -> None:
        self._drawing: _NotebookLine | _TerminalBar | None = None
        if show is not False and in_notebook():
            self._drawing = _NotebookLine(description, total, unit, completed)
        elif sys.stderr.isatty() if show == "auto" else show:
            self._drawing = _TerminalBar(description, total, unit, completed)

    def __enter__(self) -> Self:
        if self._drawing is not None:
            self._drawing.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawing is not None:
            self._drawing.stop()

    def advance(self, amount: float, text: str | None = None) -> None:
        """Advance the bar by ``amount``. ``text``, if given, replaces the string at the end of the bar."""
        if self._drawing is not None:
            self._drawing.advance(amount, text)


def track(
    items: Iterable[ItemT],
    description: str,
    *,
    total: int | None,
    unit: str,
    show: bool | Literal["auto"] = "auto",
) -> Iterator[ItemT]:
    with ProgressBar(description, total=total, unit=unit, show=show) as bar:
        for item in items:
            yield item
            bar.advance(1)


def in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class _NotebookLine:
    def __init__(self, description: str, total: float | None, unit: str, completed: float) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._begin = self._done = completed
        self._text, self._started, self._drawn = "", time.monotonic(), 0.0
        self._handle: Any = None

    def start(self) -> None:
        from IPython.display import display

        self._handle = display({"text/plain": self._line()}, raw=True, display_id=True)

    def advance(self, amount: float, text: str | None) -> None:
        self._done += amount
        self._text = self._text if text is None else text
        if time.monotonic() - self._drawn >= 1 / _REDRAWS_PER_SECOND:
            self._draw()

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._handle.update({"text/plain": self._line()}, raw=True)

    def _line(self) -> str:
        rate = (self._done - self._begin) / max(time.monotonic() - self._started, 1e-9)
        parts = [f"{self._done:.0f} {self._unit}"]
        if self._total:
            parts = [
                f"{100 * self._done / self._total:.0f}%",
                f"{self._done:.0f}/{self._total:.0f} {self._unit}",
            ]
        parts += [f"{rate:.2f} {self._unit}/s", self._text]
        return f"{self._description}: " + ", ".join(part for part in parts if part)


class _TerminalBar:
    """A progress bar in a terminal, drawn by the library ``rich``. Standard output, if it goes to the
    terminal too, appears above the bar."""

    def __init__(self, description: str, total: float | None, unit: str, completed: float) -> None:
        self._progress = _make_progress(unit)
        self._task = self._progress.add_task(description, total=total, completed=completed, text="")

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._progress.stop()

    def advance(self, amount: float, text: str | None) -> None:
        fields = {} if text is None else {"text": text}
        self._progress.update(self._task, advance=amount, **fields)


def _make_progress(unit: str):  # rich is imported only here, so that --help stays fast
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
        console=Console(file=sys.stderr, soft_wrap=True),  # long lines are not cut
        refresh_per_second=_REDRAWS_PER_SECOND,
        redirect_stdout=sys.stdout.isatty(),  # lines for a file or a pipe must reach it
        redirect_stderr=False,
    )
