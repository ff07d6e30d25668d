"""The verbs ``supervise`` and ``hang-report``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path

from ppfleetx.commands.options import Command, option, positional, switch
from ppfleetx.config.errors import ConfigError, UserError
from ppfleetx.resilience.explain import explain
from ppfleetx.resilience.hang_report import Report, latest, read_reports
from ppfleetx.resilience.report_dir import HANG_DIRS
from ppfleetx.resilience.supervisor import supervise, with_resume


@dataclass(frozen=True, kw_only=True)
class Supervise(Command):
    """Run a training command and start it again, a bounded number of times, when it fails.

        ppfleetx supervise --max-restarts 3 -- ppfleetx train -c FILE --nproc 4
        python tools/supervise.py -- python -m paddle.distributed.launch --nproc_per_node 4 \\
            tools/train.py -c FILE

    Each start has `-o Engine.save_load.resume=auto` added, unless the command says so itself, and so
    continues from the newest complete checkpoint, when nothing of the start before runs any more. A mistake
    of the user (exit code 2) and Ctrl-C (130) are not tried again; SIGTERM and Ctrl-C are passed on and end
    the supervisor too. Nothing the command started is left running.
    """

    max_restarts: int = option("how often to restart at most (default: 3)", default=3)
    backoff: float = option(
        "seconds to wait before the first restart, doubled each time (default: 5)", default=5.0
    )
    grace: float = option(
        "seconds that a stopped command has to save, before SIGKILL (default: 60)", default=60.0
    )
    command: tuple[str, ...] = positional(
        None, "the command to run, after --", default=(), nargs=argparse.REMAINDER
    )

    def run(self) -> int:
        """The exit code of the command's last start."""
        command = list(self.command[1:] if self.command[:1] == ("--",) else self.command)
        if not command:
            raise ConfigError("give the command to run after --")
        if shutil.which(command[0]) is None:
            raise ConfigError("there is no such program", key="COMMAND", value=command[0])
        for name in ("max_restarts", "backoff", "grace"):
            if not getattr(self, name) >= 0:
                key = f"--{name.replace('_', '-')}"
                raise ConfigError("must be at least 0", key=key, value=getattr(self, name))
        return supervise(
            with_resume(command),
            max_restarts=self.max_restarts,
            backoff=self.backoff,
            grace=self.grace,
        )


_SHOWN_FAULTS = 5


@dataclass(frozen=True, kw_only=True)
class HangReport(Command):
    """Say why a job hung, from the reports that its ranks left in OUTPUT_DIR/hang.

    The first line is the sentence that the job ended with: which rank is missing where. A line for each rank
    follows. Reports of an evaluation or a generation in the same directory are read too; the newest count.
    The files rank_*.txt beside the reports have each rank's last collectives and the stacks of its threads.
    """

    examples = """\
examples:
  ppfleetx hang-report output
  ppfleetx hang-report output/hang --json
"""
    directory: Path = positional("DIR", "a run's output directory, or its hang/", default=MISSING)
    json: bool = switch("print one JSON object")

    def run(self) -> None:
        """Read the reports, join them, and print what they say."""
        reports = _newest(self.directory)
        explanation = explain(reports)
        if self.json:
            ranks = {rank: _facts(report) for rank, report in sorted(reports.items())}
            print(json.dumps({**asdict(explanation), "ranks": ranks}, indent=2))
            return
        print(explanation.sentence)
        print()
        for line in _table(reports):
            print(line)


def _newest(directory: Path) -> dict[int, Report]:
    """The reports of the last hang in ``directory`` or in those that a run has below it; files that cannot be
    read are named.

    Raises:
        UserError: there is none.
    """
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
            f"none of its ranks could write (its error then names another directory){rest}"
        )
    for line in skipped[:_SHOWN_FAULTS]:
        print(f"warning: {line}", file=sys.stderr)
    return reports


def _facts(report: Report) -> dict[str, object]:
    """A report without its calls and stacks, which are in the file."""
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
