"""Run the checks of ``ppfleetx doctor`` in one process, and merge its report rows with the rows of the job's
other processes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Self

from ppfleetx.config.loader import load_config
from ppfleetx.config.message_text import ranks_text
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.shipped import CONFIGS
from ppfleetx.core.engine.check_output_dir import output_dir_of
from ppfleetx.distributed.rendezvous import RendezvousError, meeting_point
from ppfleetx.doctor.files import nearest_directory
from ppfleetx.doctor.process_connections import Answer, Guest, Host, connect_processes
from ppfleetx.doctor.rank_agreement import agreement_rows, differing, digests, host_of, read_facts
from ppfleetx.doctor.registry import CHECKS, Check, examine
from ppfleetx.doctor.results import Row, Status, Target, fail, in_groups, joined, ok, skipped, within

LOCAL_SECONDS = 1200.0
"""Time limit in seconds for all checks that a process runs without the other processes. Some checks also have
a limit of their own."""
_CHECK_SECONDS = 360.0  # longer than the limit of any single check
_SHORT_SECONDS, _LOOK_SECONDS = 60.0, 20.0
_PROCESSES, _AGREEMENT, _COLLECTIVES = "processes", "agreement", "collectives"
# A failure under one of these headings means that creating or using the process groups can fail or hang.
_DECISIVE = ("environment", "network", "configuration", _PROCESSES, _AGREEMENT)
_LOST_FIX = (
    "look at its log (workerlog.N of its machine), at its state (`ps -e -o pid,stat,args`: T is stopped, "
    "`kill -CONT PID` resumes it) and at the machine"
)
_FIRST_FAILURES = "a check failed that communication depends on"


def examine_all(
    target: Target,
    checks: Sequence[Check] | None = None,
    announce: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Run the checks that are meant for this process, and return the rows of the report. Its first rows are
    those in ``target.found``.

    Args:
        checks: the checks to choose from; None: :data:`CHECKS`.
        announce: called with the name of each check before it runs.
    """
    rows = list(target.found)
    for check in CHECKS if checks is None else checks:
        if check.is_for(target):
            announce(f"{check.group}, {check.title}")
            rows += examine(check, target)
    return rows


def examine_job(target: Target, *, seconds: float, finish: Callable[[list[Row]], None]) -> list[Row]:
    """Examine a job of several processes, and return the rows of the report. All processes must call this
    function, and all get the same rows. A process that cannot reach rank 0 returns the rows that it has so
    far.

    Args:
        seconds: how long processes wait for each other to arrive, and how long a collective may take.
        finish: called with the rows if a collective takes too long. The process then exits.
    """
    name, is_host = f"rank {target.rank} on {host_of(target)}", target.rank == 0
    place = meeting_point(), target.world_size, name, seconds
    try:
        meeting = connect_processes(*place, is_host=is_host, number=target.rank)
    except RendezvousError as error:
        row = fail("meeting", f"rank {target.rank}: {error}", error.fix)
        return in_groups([*examine_all(target), _in(_PROCESSES, row)])
    with contextlib.closing(meeting):
        job = Examination(target, meeting)
        try:
            job.run_local_checks()
            job.compare()
            job.communicate(seconds, finish)
        except RendezvousError as error:
            job.note_lost_host(error)
        return job.result()


def _in(group: str, row: Row) -> Row:
    return replace(row, group=group)


@dataclass
class Examination:
    """Runs the examination of a job in one of its processes, and collects the rows of all ranks.

    Attributes:
        meeting: the connection to the other processes.
        rows: rows of the report, by the rank that contributed them.
        of_job: rows about the job as a whole.
    """

    target: Target
    meeting: Host | Guest
    rows: list[list[Row]] = field(default_factory=list)
    of_job: list[Row] = field(default_factory=list)
    _lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rows = [[] for _ in range(self.target.world_size)]

    def result(self) -> list[Row]:
        return in_groups([*joined(self.rows), *self.of_job])

    def run_local_checks(self) -> None:
        self._share(examine_all(self.target, announce=self.meeting.announce), _CHECK_SECONDS)

    def _share(self, own: Sequence[Row], seconds: float) -> None:
        """Exchange report rows with all other processes, and add the rows of all ranks to :attr:`rows`. If
        rank 0 no longer answers, only this process's own rows are added, and RendezvousError is raised."""
        try:
            answers = self.meeting.exchange([row.as_json() for row in own], seconds)
        except RendezvousError:
            self.rows[self.target.rank] += own
            raise
        self._take(answers)

    def _take(self, answers: Sequence[Answer]) -> None:
        for rank, answer in enumerate(answers):
            if not answer.problem:
                self.rows[rank] += [Row.from_json(row) for row in answer.value]
            elif rank not in self._lost:
                self._lost.add(rank)
                text = f"{self.meeting.names[rank]}: {answer.problem}"
                self.of_job.append(_in(_PROCESSES, fail(f"rank {rank}", text, _LOST_FIX)))

    def compare(self) -> None:
        """Check that versions, configuration, data and so on are equal in all processes, and that all
        machines see the same output directory."""
        facts = read_facts(self.target, lambda what: self.meeting.announce(f"{_AGREEMENT}, {what}"))
        # Hashes first, because most facts are equal on all processes.
        hashes = self._answered(self.meeting.exchange(digests(facts), _SHORT_SECONDS))
        names = differing(list(hashes.values()))
        mine = {name: facts[name] for name in names}
        values = self._answered(self.meeting.exchange(mine, _SHORT_SECONDS))
        self.of_job += [_in(_AGREEMENT, row) for row in agreement_rows(values, names)]
        if self.target.cfg is not None:
            self.of_job += [_in(_AGREEMENT, row) for row in self._shared_directory()]

    def note_lost_host(self, error: RendezvousError) -> None:
        """Add a report row that says that rank 0 no longer answers."""
        self.rows[self.target.rank].append(_in(_PROCESSES, fail("first rank", str(error), error.fix)))

    def _answered(self, answers: Sequence[Answer]) -> dict[int, dict]:
        self._take([Answer([], answer.problem) for answer in answers])
        return {rank: answer.value for rank, answer in enumerate(answers) if not answer.problem}

    def _shared_directory(self) -> Iterator[Row]:
        """Check that all machines see the same output directory. Rank 0 creates a temporary file in the
        directory, and all other processes look for the file."""
        place = output_dir_of(self.target.cfg)
        # Here and below, errors of the file system are suppressed because another check reports them.
        with contextlib.suppress(TimeoutError, OSError):
            place = within(_LOOK_SECONDS, partial(nearest_directory, place))
        with contextlib.ExitStack() as stack:
            mark = ""
            if self.target.rank == 0:
                with contextlib.suppress(TimeoutError, OSError):
                    made = within(
                        _LOOK_SECONDS, partial(NamedTemporaryFile, dir=place, prefix=".ppfleetx-doctor-")
                    )
                    mark = Path(stack.enter_context(made).name).name
            names = self.meeting.exchange([mark, host_of(self.target)], _SHORT_SECONDS)
            mark = names[0].value[0]
            is_there = False
            with contextlib.suppress(TimeoutError, OSError):
                is_there = bool(mark) and within(_LOOK_SECONDS, (place / mark).exists)
            seen = self.meeting.exchange(is_there, _SHORT_SECONDS)
        blind = [rank for rank, answer in enumerate(seen) if not answer.problem and not answer.value]
        hosts = {answer.value[1] for answer in names if not answer.problem}
        if not mark:
            yield skipped("shared directory", "rank 0 could not write to the output directory")
        elif blind:
            yield fail(
                "shared directory",
                f"{ranks_text(blind)}: {place} is not the directory of that name that rank 0 has",
                "give all machines one output directory on a shared file system: it holds the checkpoints of "
                "all ranks",
            )
        elif len(hosts) > 1:
            yield ok("shared directory", f"all {len(hosts)} machines see the same {place}")

    def communicate(self, seconds: float, finish: Callable[[list[Row]], None]) -> None:
        """Create Paddle fleet's process groups, and test every collective in each group. Both are skipped if
        an earlier check found a fault that could make them fail or hang. If a step takes longer than
        ``seconds``, ``finish`` is called with the report's rows, and the process exits."""
        failed = [row for row in self.result() if row.status is Status.FAIL and row.group in _DECISIVE]
        if failed or self._lost:
            self.of_job.append(_in(_COLLECTIVES, skipped("collectives", _FIRST_FAILURES)))
            return
        own: list[Row] = []

        def announce(what: str) -> None:
            guard.begin(what)
            if not guard.has_given_up:  # after giving up, the guard's thread uses the connections
                self.meeting.announce(what)

        def give_up(what: str) -> None:
            text = f"{what} did not end within {seconds:g} s"
            fix = "another row names the rank that the others wait for; NCCL_DEBUG=INFO shows what NCCL does"
            own.append(fail("communication", text, fix))
            try:
                self._share_collectives(own, seconds)
            except RendezvousError as error:
                self.note_lost_host(error)
            finish(self.result())
            sys.stdout.flush()
            os._exit(1)

        with Guard(seconds, give_up) as guard:
            announce("joining the process groups")
            self._collectives(announce, own, guard)
        self._share_collectives(own, seconds)

    def _share_collectives(self, own: Sequence[Row], seconds: float) -> None:
        rows = [_in(_COLLECTIVES, row) for row in own]
        self._share(rows, seconds + _SHORT_SECONDS / 2)
        self.rows, measured = split_slowest(self.rows)
        self.of_job += measured

    def _collectives(self, announce: Callable[[str], None], rows: list[Row], guard: Guard) -> None:
        from ppfleetx.distributed.init import init_distributed
        from ppfleetx.doctor.collectives import examine_groups

        try:
            ctx = init_distributed(plan_config(self.target))
            rows.append(ok("process groups", f"joined: {', '.join(('job', *ctx.groups))}"))
            for row in examine_groups(ctx, announce):
                rows.append(row)
        except Exception as error:  # noqa: BLE001  (whatever a communication library raises is a finding)
            if guard.has_given_up:
                return
            fix = "look at the first rank that failed, at its log and its machine"
            rows.append(fail("communication", f"{type(error).__name__}: {str(error)[:400]}", fix))


class Guard:
    """A time limit for each of several steps. :meth:`begin` ends the previous step and starts the next one.
    If a step takes longer than ``seconds``, a thread calls ``give_up`` with the step's description."""

    def __init__(self, seconds: float, give_up: Callable[[str], None]) -> None:
        self._seconds, self._give_up, self.has_given_up = seconds, give_up, False
        self._timer: threading.Timer | None = None

    def begin(self, what: str) -> None:
        self._cancel()
        if not self.has_given_up:
            self._timer = threading.Timer(self._seconds, self._expire, (what,))
            self._timer.daemon = True
            self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._cancel()
        if self.has_given_up:
            self._timer.join()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, what: str) -> None:
        self.has_given_up = True
        self._give_up(what)


def plan_config(target: Target) -> RunConfig:
    """Return the configuration whose process groups are tested. This is the user's configuration if its plan
    has as many processes as this job. Otherwise, it is the configuration of a tiny model with data
    parallelism."""
    if target.cfg is not None and target.cfg.plan.world_size == target.world_size:
        return target.cfg
    given = [f"Global.device={target.device}", "Global.local_batch_size=1", "Global.micro_batch_size=1"]
    return load_config(str(CONFIGS / "debug/gpt_nano.yaml"), given, world_size=target.world_size)


def split_slowest(rows_of_ranks: Sequence[Sequence[Row]]) -> tuple[list[list[Row]], list[Row]]:
    """Separate the rows that report the speeds of collectives from all other rows. Returns the other rows by
    rank, and the row of the slowest rank for each collective."""
    found: dict[str, tuple[float, int, Row]] = {}
    for rank, rows in enumerate(rows_of_ranks):
        for row in filter(_is_measured, rows):
            speed = list(row.numbers.values())[-1]
            if row.name not in found or speed < found[row.name][0]:
                found[row.name] = speed, rank, row
    rest = [[row for row in rows if not _is_measured(row)] for rows in rows_of_ranks]
    return rest, [
        replace(row, found=f"{row.found} (slowest: rank {rank})") for _, rank, row in found.values()
    ]


def _is_measured(row: Row) -> bool:
    return row.group == _COLLECTIVES and bool(row.numbers)
