"""Implement ``ppfleetx hang-report``, which explains why a job hung."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.config.errors import UserError
from ppfleetx.resilience.hang_diagnosis import explain
from ppfleetx.resilience.hang_report import HANG_DIRS, Report, latest, read_reports

if TYPE_CHECKING:
    from ppfleetx.commands.train_verbs import HangReport

_SHOWN_FAULTS = 5


def print_report(options: HangReport) -> None:
    """Print why the job last hung, according to the reports of all ranks, and then a line for each rank. With
    ``--json``, print one JSON object instead."""
    reports = _newest_reports(options.directory)
    explanation = explain(reports)
    if options.json:
        ranks = {rank: _facts(report) for rank, report in sorted(reports.items())}
        print(json.dumps({**asdict(explanation), "ranks": ranks}, indent=2))
        return
    written = datetime.fromtimestamp(max(report.written for report in reports.values())).astimezone()
    print(explanation.sentence, "", *_table(reports), f"written {written:%Y-%m-%d %H:%M:%S %Z}", sep="\n")


def _newest_reports(directory: Path) -> dict[int, Report]:
    """Return the reports of the last hang, by rank. ``directory`` contains the reports, or is the output
    directory of a run. Raises UserError if there is no report."""
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such directory")
    faults: dict[Path, str] = {}
    places = [directory, *(directory / name for name in HANG_DIRS)]
    found = [latest(read_reports(place, faults=faults)) for place in places]
    skipped = [f"{path.relative_to(directory)} is skipped: {fault}" for path, fault in faults.items()]
    reports = max(found, key=lambda one: max((report.written for report in one.values()), default=0.0))
    if not reports:
        rest = f". {'; '.join(skipped[:_SHOWN_FAULTS])}" if skipped else ""
        raise UserError(
            f"{directory} has no report of a rank (rank_*.json): no job has hung there, or "
            f"none of its ranks could write{rest}"
        )
    for line in skipped[:_SHOWN_FAULTS]:
        print(f"warning: {line}", file=sys.stderr)
    return reports


def _facts(report: Report) -> dict[str, object]:
    facts = asdict(report)
    for name in ("calls", "stacks", "counts"):
        del facts[name]
    return facts


def _table(reports: Mapping[int, Report]) -> Iterator[str]:
    size = max(report.world_size for report in reports.values())
    for rank in range(size):
        report = reports.get(rank)
        if report is None:
            yield f"rank {rank}: no report"
            continue
        state = f"waits in {report.waits_for}" if report.waits_for else f"{report.place}, {report.where}"
        if report.failure:
            yield f"rank {rank} on {report.host}, step {report.step}: {state}; {report.failure}"
            continue
        step = "before its first step" if report.step is None else f"step {report.step}"
        yield f"rank {rank} on {report.host}, {step}: {state}; no progress for {report.quiet_seconds:.0f} s"
