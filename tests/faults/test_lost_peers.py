"""A rank is killed during a step, an evaluation or a save: the others end in time and name it."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan
from tests.faults.harness import Job

PROGRAM = "tests/faults/hang_program.py"


@dataclass(frozen=True)
class Case:
    """The killed rank, and the moment in the notation of ``hang_program.py``."""

    plan: ParallelPlan
    at: str
    rank: int
    in_background: bool = False

    def __str__(self) -> str:
        return f"{self.plan}; rank {self.rank} at {self.at}"


CASES = (
    # In the backward pass, where Paddle puts an error of its own in the place of ours.
    Case(ParallelPlan(mp=2), "step:0.7", 1),
    Case(ParallelPlan(mp=2), "step:0.2", 0),
    Case(ParallelPlan(pp=2, sharding=2, sharding_stage=3), "eval:0.5", 1),
    Case(ParallelPlan(sep=2), "save:1", 1, in_background=True),
)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_others_end_and_name_who_was_lost(tmp_path: Path, corpus: Path, case: Case) -> None:
    overrides = {
        "Engine.eval_freq": 3,
        "Engine.save_load.save_steps": 3,
        "Engine.save_load.async_save": case.in_background,
    }
    environment = {"HANG_DIR": str(tmp_path), "HANG_RANK": str(case.rank), "HANG_CASE": case.at}
    job = Job(PROGRAM, case.plan, (None,), corpus, tmp_path, 0, overrides, environment)
    others = [rank for rank in range(case.plan.world_size) if rank != case.rank]
    try:
        job.await_halt()
        begin = time.monotonic()
        os.kill(int((tmp_path / "reached").read_text()), signal.SIGKILL)
        # A launcher ends with the code of its first rank that failed.
        assert job.wait_for_launchers(60) == [137 if case.rank == 0 else 3]
        assert time.monotonic() - begin < 30
    finally:
        job.close(())
    for rank in others:
        assert re.search(rf"error: rank {rank}\b.*rank {case.rank} at [\d.]+:\d+\b", job.log(rank))
        assert "Traceback" not in job.log(rank)
