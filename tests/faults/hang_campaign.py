"""Nine ways in which a job hangs. Each must end in time with one correct sentence.

``make hangs`` runs the training program in ranks that communicate on the CPU, makes one of them stop, sleep,
deviate or die, and checks the output and the exit code of the job. The lost link needs root, for two network
namespaces.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.resilience.hang_diagnosis import explain
from ppfleetx.resilience.hang_report import latest, read_reports
from tests.faults.harness import Job
from tests.multinode.nodes import Node, two_nodes

PROGRAM = "tests/faults/hang_program.py"
TIMEOUT_SECONDS = 6.0
SPARE_SECONDS = 20.0
"""Beyond the time-out: for the reports to be joined, and the launcher to end."""


@dataclass(frozen=True)
class Case:
    """A kind of hang.

    Attributes:
        name: of the fault in ``hang_program.py``.
        rank: the rank that hangs.
        said: pattern of the sentence that a rank prints; "" if none does.
        codes: exit codes that the launcher may end with.
        reported: pattern of what ``ppfleetx hang-report`` says later; "" for the same, None for nothing.
    """

    name: str
    plan: ParallelPlan
    rank: int
    said: str
    codes: tuple[int, ...] = (4,)
    reported: str | None = ""


CASES = (
    Case(
        "stop",
        ParallelPlan(dp=2, mp=2),
        3,
        r"rank \d waits in \w+ #\d+ of the \w+ group \[.*\].*; rank 3 never arrived and wrote no report: "
        r"its process is stopped \(SIGSTOP",
    ),
    Case(
        "shapes",
        ParallelPlan(dp=2),
        1,
        r"rank \d: waiting for rank \d in all_reduce of group 0 \(\d+ bytes\): it sent all_reduce "
        r"\(\d+ bytes\) in its place",
        codes=(1,),
        reported=r"the calls differ: as number \d+ rank 0 calls all_reduce with shape \[4\] of float32, "
        r"rank 1 calls all_reduce with shape \[5\] of float32",
    ),
    Case(
        "skipped",
        ParallelPlan(dp=2),
        1,
        r"rank 0 waits in all_reduce #0 of group \d+ \[0, 1\] \(shape \[2, 3\], float32\), rank 1 waits "
        r"in .*, so each waits for the other; the last that both called was .*; the ranks do not run",
    ),
    Case(
        "order",
        ParallelPlan(dp=2),
        1,
        r"rank 0 waits in all_reduce #0 of group (\d+) .* rank 1 waits in all_reduce #0 of group "
        r"(?!\1)\d+.*, so each waits for the other",
    ),
    Case(
        "data",
        ParallelPlan(dp=2),
        1,
        r"rank 0 waits in all_gather #\d+ of the job's group \[0, 1\].*; rank 1 never arrived: "
        r"it is reading data \(hang_program.py:\d+ in for_ever\)",
    ),
    Case(
        "disk",
        ParallelPlan(mp=2),
        0,
        r"rank 1 waits in .* group \[0, 1\].*; rank 0 never arrived: it is saving a checkpoint "
        r"\(hang_program.py:\d+ in for_ever\)",
    ),
    Case(
        "importing",
        ParallelPlan(dp=2),
        1,
        r"rank 0 waits in .*; rank 1 never arrived: it is importing waits_for_a_lock",
    ),
    Case(
        "another_step",
        ParallelPlan(dp=2),
        1,
        r"rank \d: waiting for rank \d in .*the ranks do not run the same operations in the same order",
        codes=(1,),
        reported=r"the calls differ: as number \d+ rank 0 calls all_gather with shape \[7\] of int64, rank 1 "
        r"calls all_gather with shape \[1\] of int64; rank 1 is at step 4, the others at step 3|"
        r"the calls differ: as number \d+ rank 0 calls .*, rank 1 calls .*",
    ),
    Case("link", ParallelPlan(dp=2), 1, r"waits? in .*the messages do not get through; the network"),
)


@dataclass
class Found:
    """The output of a job that hung."""

    seconds: float
    codes: list[int]
    sentence: str
    reported: str
    complaints: list[str]


class Hang:
    """A job that hangs."""

    def __init__(
        self, case: Case, hosts: Sequence[Node | None], corpus: Path, directory: Path, device: str = "cpu"
    ) -> None:
        self.case, self.directory = case, directory
        overrides = {
            "Global.device": device,
            "Engine.eval_freq": 4,
            "Engine.save_load.save_steps": 4,
            "Engine.hang_timeout": TIMEOUT_SECONDS,
        }
        environment = {"HANG_DIR": str(directory), "HANG_RANK": str(case.rank), "HANG_CASE": case.name}
        self.job = Job(PROGRAM, case.plan, hosts, corpus, directory, 38524, overrides, environment)

    def judge(self) -> Found:
        """Wait for the end of the job and check its output."""
        begin, limit = time.monotonic(), TIMEOUT_SECONDS + SPARE_SECONDS
        codes = self.job.wait_for_launchers(limit)
        seconds = time.monotonic() - begin
        said = [line for line in self.job.said().splitlines() if "error:" in line or "Error:" in line]
        fitting = [line for line in said if re.search(self.case.said, line)]
        complaints = []
        if len(codes) < len(self.job.launchers):
            complaints.append(f"not ended after {limit:g} s")
        if self.case.said and not fitting:
            complaints.append(f"no such sentence, but {said}")
        if set(codes) - set(self.case.codes):
            complaints.append(f"exit codes {codes}")
        if "Traceback" in self.job.said() and 1 not in self.case.codes:  # ranks out of step are a defect
            complaints.append("a traceback")
        reported = self._report(complaints)
        return Found(seconds, codes, fitting[0] if fitting else "", reported, complaints)

    def _report(self, complaints: list[str]) -> str:
        """The sentence of ``ppfleetx hang-report``."""
        if self.case.reported is None:
            return ""
        reports = latest(read_reports(self.directory / "run" / "hang"))
        if not reports:
            complaints.append("no report of a rank")
            return ""
        sentence = explain(reports).sentence
        if not re.search(self.case.reported or self.case.said, f"{sentence}; "):
            complaints.append(f"reported is {sentence}")
        return sentence

    def close(self) -> None:
        """Kill every process that is left."""
        reached = self.directory / "reached"
        self.job.close([int(reached.read_text())] if reached.exists() else [])


def run_case(case: Case, corpus: Path, directory: Path, device: str = "cpu") -> Found:
    """Let the job hang and check its output. Ranks on GPUs need ``PPFLEETX_TESTS_EXECUTE=1``."""
    with _surroundings(case) as hosts:
        hang = Hang(case, hosts, corpus, directory, device)
        try:
            hang.job.await_halt()
            if case.name == "link":
                hosts[-1].unplug()
            return hang.judge()
        finally:
            hang.close()


@contextlib.contextmanager
def _surroundings(case: Case) -> Iterator[Sequence[Node | None]]:
    if case.name == "link":
        with two_nodes() as nodes:
            yield nodes
    else:
        yield (None,)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hang_is_told(case: Case, corpus: Path, tmp_path: Path) -> None:
    found = run_case(case, corpus, tmp_path)
    print(
        f"{found.seconds:.1f} s, exit codes {found.codes}: {found.sentence}\n    reported: {found.reported}"
    )
    assert found.complaints == []
