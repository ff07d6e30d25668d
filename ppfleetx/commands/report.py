"""The verb ``report``: one page about a run."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass
from pathlib import Path

from ppfleetx.commands.options import Command, option, plugin_option, positional
from ppfleetx.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Describe a run on one page: curves, evaluations, samples, speed, memory, plan, data and cost.

    Reads what the run's directory holds and writes report.md and report.html. Samples are those of `ppfleetx
    generate RUN PROMPT --output RUN/samples.jsonl`. The run may still be training.
    """

    examples = """\
examples:
  ppfleetx report output
  ppfleetx report output --output page --price 1.80
"""
    directory: Path = positional("RUN", "directory of a run", default=MISSING)
    output: Path | None = option("where the page is written (default: RUN/report)", metavar="DIR")
    price: float | None = option("price of a device-hour, for the cost", metavar="P")
    plugin: tuple[str, ...] = plugin_option()

    def run(self) -> None:
        """Write the page."""
        from ppfleetx.commands.run_report import read_run_files, write_report

        if self.price is not None and not 0 < self.price < math.inf:
            raise ConfigError("must be greater than 0", key="--price", value=self.price)
        run = read_run_files(self.directory)
        for path in write_report(run, self.output or self.directory / "report", self.price):
            print(f"report: {path}")
