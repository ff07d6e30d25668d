"""Ranks and hosts that are lost at chosen moments of a run: every other rank must end in time and say why.

``python -m tests.faults.lost_peer_campaign --cases 20`` runs the training program under Paddle's launcher,
on one host or on two (network namespaces, which need root), under plans of all kinds. At the start, or in
the middle of a step, an evaluation or a save, one rank halts; then it is killed, or its host's link goes
down, or its host goes down with all on it. Every rank that is left must end within 60 seconds with exit code
3, without a traceback, and with the name of a rank that was lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ppfleetx.config.plan import ParallelPlan
from ppfleetx.utils.peers import START_VARIABLE
from tests.faults.harness import Job, command_line, run_cases
from tests.multinode.nodes import Node, two_nodes

LIMIT_SECONDS = 60.0
MEETING_SECONDS = 40  # a rank that never came was no peer yet: waiting for it has a limit of its own
PROGRAM = "tests/faults/lost_peer_program.py"

PLANS = (
    ParallelPlan(dp=4),
    ParallelPlan(mp=4),
    ParallelPlan(pp=4),
    ParallelPlan(sep=4),
    ParallelPlan(sharding=4, sharding_stage=1),
    ParallelPlan(sharding=4, sharding_stage=2),
    ParallelPlan(sharding=4, sharding_stage=3),
    ParallelPlan(dp=2, mp=2),
    ParallelPlan(dp=2, pp=2),
    ParallelPlan(mp=2, pp=2),
    ParallelPlan(mp=2, pp=2, sequence_parallel=True),
    ParallelPlan(dp=2, sep=2),
    ParallelPlan(sep=2, mp=2),
    ParallelPlan(dp=2, sharding=2, sharding_stage=3),
    ParallelPlan(mp=2, sharding=2, sharding_stage=2),
    ParallelPlan(pp=2, sharding=2, sharding_stage=1),
    ParallelPlan(pp=2, sharding=2, sharding_stage=3),
    ParallelPlan(pp=2, virtual_pp_degree=2),
    ParallelPlan(dp=2, pp=2, virtual_pp_degree=2),
    ParallelPlan(mp=2),
)


@dataclass(frozen=True)
class Case:
    """One loss.

    Attributes:
        event: ``kill`` a rank, a ``link`` down, or a ``host`` down.
        at: the moment, as ``lost_peer_program.py`` takes it.
        rank: the rank that halts then.
    """

    plan: ParallelPlan
    event: str
    at: str
    rank: int
    in_background: bool = False

    def __str__(self) -> str:
        at = self.at.replace("save", "background save") if self.in_background else self.at
        return f"{self.plan}; {self.event} at {at}, rank {self.rank}"


@dataclass
class Found:
    """How the remaining ranks ended."""

    seconds: float
    codes: list[str]
    launchers: list[int]
    complaints: list[str]


def draw_cases(count: int, seed: int, *, hosts: bool = True) -> list[Case]:
    """Losses that have every plan, event and moment in turn and the rest at random."""
    drawn, cases = random.Random(seed), []
    events = ("kill", "link", "kill", "host") if hosts else ("kill",)
    for number in range(count):
        plan, event = PLANS[number % len(PLANS)], events[number % len(events)]
        moment = ("step", "eval", "save", "step", "save")[number % 5]
        if number % 10 == 9 and event != "kill":  # on one host the launcher ends all before they have met
            moment = "start"
        share = drawn.randrange(2) if moment in ("save", "start") else round(drawn.random(), 2)
        half = plan.world_size // 2
        rank = drawn.randrange(plan.world_size) if event == "kill" else half + drawn.randrange(half)
        cases.append(Case(plan, event, f"{moment}:{share}", rank, moment == "save" and drawn.random() < 0.5))
    return cases


class Loss:
    """A job that loses a rank or a host."""

    def __init__(self, case: Case, hosts: Sequence[Node | None], corpus: Path, directory: Path) -> None:
        self.case, self.hosts, self.directory = case, hosts, directory
        self._per_host = case.plan.world_size // len(hosts)
        overrides = {
            "Engine.eval_freq": 3,
            "Engine.save_load.save_steps": 3,
            "Engine.save_load.async_save": case.in_background,
        }
        environment = {
            "LOST_DIR": str(directory),
            "LOST_RANK": str(case.rank),
            "LOST_AT": case.at,
            START_VARIABLE: str(MEETING_SECONDS),
        }
        self.job = Job(PROGRAM, case.plan, hosts, corpus, directory, 38523, overrides, environment)

    def await_halt(self) -> None:
        """Wait until the rank has come to its moment, and all others have been started."""
        pids = [self.directory / f"pid.{rank}" for rank in range(self.case.plan.world_size)]
        self.job.await_halt(lambda: all(pid.exists() for pid in pids))

    def pid(self, rank: int) -> int:
        return int((self.directory / f"pid.{rank}").read_text())

    def is_alive(self, rank: int) -> bool:
        status = Path(f"/proc/{self.pid(rank)}/stat")
        with contextlib.suppress(OSError):
            return status.read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    def strike(self) -> list[int]:
        """Cause the loss; return the remaining ranks."""
        ranks, second = range(self.case.plan.world_size), self.hosts[-1]
        if self.case.event == "kill":
            os.kill(self.pid(self.case.rank), signal.SIGKILL)
            return [rank for rank in ranks if rank != self.case.rank]
        second.unplug()
        left = list(ranks)
        if self.case.event == "host":
            left = left[: self._per_host]
            os.killpg(self.job.launchers[-1].pid, signal.SIGKILL)
            for rank in ranks[self._per_host :]:
                os.kill(self.pid(rank), signal.SIGKILL)
        (self.directory / "go").touch()
        return left

    def lost_by(self, rank: int) -> list[int]:
        """The ranks that this one may name."""
        if self.case.event == "kill":
            return [self.case.rank]
        here = rank // self._per_host
        return [other for other in range(self.case.plan.world_size) if other // self._per_host != here]

    def judge(self, left: list[int], begin: float) -> Found:
        """Wait until the remaining ranks have ended, and read what they printed."""
        while any(map(self.is_alive, left)) and time.monotonic() < begin + LIMIT_SECONDS + 30:
            time.sleep(0.1)
        seconds = time.monotonic() - begin
        complaints = [f"rank {rank} did not end" for rank in left if self.is_alive(rank)]
        codes = []
        for rank in left:
            code = self.directory / f"code.{rank}"
            starting = self.ended_while_starting(rank, left)
            if code.exists() or not starting:
                codes.append(code.read_text() if code.exists() else "none")
            said = self.job.log(rank)
            if not starting and not self.names(rank, self.lost_by(rank)):
                complaints.append(f"rank {rank} does not name a rank of {self.lost_by(rank)}")
            if "Traceback" in said:
                complaints.append(f"rank {rank} has a traceback")
        if seconds > LIMIT_SECONDS:
            complaints.append(f"{seconds:.0f} s")
        if {code.split()[0] for code in codes} != {"3"}:
            complaints.append(f"exit codes {codes}")
        remaining = self.job.launchers[:1] if self.case.event == "host" else self.job.launchers
        launchers = self.job.wait_for_launchers(30, remaining)
        # A launcher ends with the code of its first rank that failed; 247 is -9, as Paddle has it.
        first_was_killed = self.case.event == "kill" and self.case.rank == 0
        if set(launchers) - ({137, 247} if first_was_killed else {3}):
            complaints.append(f"exit codes of the launchers: {launchers}")
        return Found(seconds, codes, launchers, complaints)

    def names(self, rank: int, lost: list[int]) -> bool:
        """Whether the error of a rank names a lost one, with its address if the two had connected."""
        others = "|".join(map(str, lost))
        met = rf"error: rank {rank}\b.*rank ({others}) at [\d.]+:\d+\b"
        not_met = rf"error: rank {rank}: .*\branks? [\d, ]*({others})[\d, ]* did not come to"
        is_named = re.search(met, self.job.log(rank)) is not None
        return is_named or (self.case.at == "start:0" and re.search(not_met, self.job.log(rank)) is not None)

    def ended_while_starting(self, rank: int, left: list[int]) -> bool:
        """Whether another rank of the same host gave up first, while they started, and named the lost.

        The launcher ends such a rank, or it finds its neighbour gone: both before it has met the lost one.
        """
        if self.case.event != "link" or not self.case.at.startswith("start"):
            return False
        here = [
            other for other in left if other // self._per_host == rank // self._per_host and other != rank
        ]
        return any(self.names(other, self.lost_by(other)) for other in here)

    def close(self) -> None:
        """Kill every process that is left."""
        self.job.close([int(file.read_text()) for file in self.directory.glob("pid.[0-9]")])


def run_case(case: Case, corpus: Path, directory: Path) -> Found:
    """Run the job, cause the loss, and check how the others end."""
    with hosts_of(case) as hosts:
        loss = Loss(case, hosts, corpus, directory)
        try:
            loss.await_halt()
            begin = time.monotonic()
            return loss.judge(loss.strike(), begin)
        finally:
            loss.close()


@contextlib.contextmanager
def hosts_of(case: Case) -> Iterator[Sequence[Node | None]]:
    if case.event == "kill":
        yield (None,)
    else:
        with two_nodes() as nodes:
            yield nodes


def main() -> int:
    parser = command_line(__doc__, cases=20)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    parser.add_argument("--keep", type=Path, help="directory for what the ranks say")
    arguments = parser.parse_args()

    def tried(case: Case, corpus: Path, directory: Path) -> tuple[str, list[str]]:
        found = run_case(case, corpus, directory)
        return f"{found.seconds:.1f} s, ranks {found.codes}, launchers {found.launchers}", found.complaints

    cases = enumerate(draw_cases(arguments.cases, arguments.seed))
    chosen = [(n, case) for n, case in cases if not arguments.only or n in arguments.only]
    return run_cases([(f"{n:2d} {case}", partial(tried, case)) for n, case in chosen], arguments.keep)


if __name__ == "__main__":
    sys.exit(main())
