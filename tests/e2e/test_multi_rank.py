"""The program under Paddle's launcher: several ranks train as one, stop as one, and fail with one message."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Tool, environment, losses, records
from tests.helpers import programs
from tests.helpers.leftovers import children, leftovers
from tests.helpers.waiting import wait_for

COMMON = (
    "Global.global_batch_size=8",
    "Global.local_batch_size=null",
    "Model.hidden_dropout_prob=0",
    "Model.attention_probs_dropout_prob=0",
)


class Job:
    """One start of the launcher, in a process group of its own; forked unless ``executed``."""

    def __init__(self, tool: Tool, output_dir: Path, num_ranks: int, *overrides: str, **options) -> None:
        script = options.pop("script", "tools/train.py")
        start = subprocess.Popen if options.pop("executed", False) else programs.Popen
        before, environ = options.pop("before", ()), {**environment(), **options}
        program = tool.command(script, output_dir, *COMMON, *overrides)
        self.log_dir = output_dir.with_name(output_dir.name + "_log")
        launcher = ["-m", "paddle.distributed.launch", "--log_dir", str(self.log_dir)]
        command = [*before, sys.executable, *launcher, f"--nproc_per_node={num_ranks}", *program[1:]]
        self._others = children()
        self.process = start(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
            cwd=ROOT,
            start_new_session=True,
        )

    def wait(self, timeout: float = 200) -> tuple[int, str]:
        """(exit code, output); nothing of the job is left running, its ranks have sessions of their own."""
        try:
            output = self.process.communicate(timeout=timeout)[0]
        finally:
            self.process.kill()
        assert leftovers(self._others) == {}, "ranks outlived the launcher"
        return self.process.returncode, output

    def log(self, rank: int) -> str:
        return (self.log_dir / f"workerlog.{rank}").read_text()


@pytest.fixture(scope="module")
def one_process(tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("one_process")
    tool.ok(output_dir, *COMMON)
    return output_dir


def is_gone(rank: int, said: str, why: str = "") -> bool:
    """Whether it was said that ``rank`` is gone, where it was, and why."""
    return re.search(rf"rank {rank} at [\d.]+:\d+ is gone: {why}", said) is not None


def is_named(rank: int, job: Job, output: str, num_ranks: int) -> bool:
    """Whether the lost rank was named: by the launcher, or by a rank that it let finish its sentence."""
    said = (is_gone(rank, job.log(other)) for other in range(num_ranks) if other != rank)
    return f"Container rank {rank} " in output or any(said)


def assert_same_losses(output_dir: Path, expected: Path) -> None:
    got, wanted = losses(output_dir), losses(expected)
    assert [step for step, *_ in got] == [step for step, *_ in wanted]
    for one, other in zip(got, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_four_ranks_train_as_one(tool: Tool, tmp_path: Path, one_process: Path) -> None:
    job = Job(tool, tmp_path / "run", 4, "Distributed.pp_degree=2")
    code, output = job.wait()
    assert code == 0, output
    assert_same_losses(tmp_path / "run", one_process)
    assert [r["step"] for r in records(tmp_path / "run", "eval")] == [0, 4, 8]
    assert "dp 2, mp 1, pp 2" in output
    assert "ranks 0, 2" in output
    # The launcher shows rank 0; the loss is computed at the end of the pipeline, first by rank 1.
    steps = [len(re.findall(r"global step \d+, epoch: 0, .* loss: ", job.log(rank))) for rank in range(4)]
    assert steps == [8, 8, 0, 0]
    step_dir = tmp_path / "run" / "epoch_0_step_8"
    pieces = sorted(path.name for path in step_dir.glob("mp_*"))
    assert pieces == ["mp_00_sharding_00_pp_00", "mp_00_sharding_00_pp_01"]


def test_a_rank_that_raises_is_shown_and_ends_the_job(tool: Tool, tmp_path: Path) -> None:
    started = time.monotonic()
    job = Job(tool, tmp_path / "run", 2, script="tests/e2e/faulty_train.py", FAULT="1:3:raise")
    code, output = job.wait()
    assert code != 0
    assert time.monotonic() - started < 30
    assert "Container rank 1" in output
    assert "RuntimeError: a fault made for a test" in output
    assert is_gone(1, job.log(0), "it failed with RuntimeError: a fault made for a test")
    assert "Traceback" not in job.log(0)


def test_a_mistake_one_rank_finds_is_one_message_and_code_2(tool: Tool, tmp_path: Path) -> None:
    job = Job(tool, tmp_path / "run", 2, script="tests/e2e/faulty_train.py", FAULT="1:3:data")
    code, output = job.wait()
    assert code == 2, output
    assert "error: rank 1: the corpus is gone" in output
    assert "Traceback" not in output


def test_sigterm_stops_all_ranks_after_the_same_step(tool: Tool, tmp_path: Path) -> None:
    steps = ("Engine.max_steps=2000", "Engine.eval_freq=0", "Engine.save_load.save_steps=null")
    job = Job(tool, tmp_path / "run", 2, "Distributed.pp_degree=2", *steps, executed=True)
    wait_for(lambda: len(losses(tmp_path / "run")) >= 3, 60, running=[job.process])
    job.process.send_signal(signal.SIGTERM)
    code, _ = job.wait()
    assert code == 0  # the run did what it was asked to do
    last = losses(tmp_path / "run")[-1][0]
    for rank in range(2):
        assert f"after global step {last} of 2000" in job.log(rank)
    assert (tmp_path / "run" / f"epoch_0_step_{last}").is_dir()


def supervised(tool: Tool, directory: Path, num_ranks: int, fault: str, *overrides: str) -> tuple[Job, str]:
    """A job that a fault ends once and the supervisor completes; with what it said."""
    job = Job(
        tool,
        directory / "run",
        num_ranks,
        *overrides,
        script="tests/e2e/faulty_train.py",
        before=(sys.executable, "tools/supervise.py", "--backoff=0.2", "--max-restarts=1", "--"),
        FAULT=fault,
        FAULT_ONCE=str(directory / "once"),
    )
    code, output = job.wait()
    assert code == 0, output
    return job, output


def test_the_supervisor_completes_a_run_whose_rank_was_killed(
    tool: Tool, tmp_path: Path, one_process: Path
) -> None:
    plan = ("Distributed.mp_degree=2", "Engine.save_load.save_steps=2")
    job, output = supervised(tool, tmp_path, 4, "2:6:kill", *plan)
    assert is_named(2, job, output, 4)
    assert "(global step 4)" in output
    assert_same_losses(tmp_path / "run", one_process)


def test_a_run_goes_on_when_its_launcher_was_killed(tool: Tool, tmp_path: Path, one_process: Path) -> None:
    """Its ranks save and end, then the supervisor starts again."""
    plan = ("Distributed.mp_degree=2", "Engine.save_load.save_steps=null")
    _, output = supervised(tool, tmp_path, 2, "1:4:kill_launcher", *plan)
    assert "the command failed with code 137" in output
    assert re.search(r"training continues at global step [45] of 8", output), output
    assert_same_losses(tmp_path / "run", one_process)


def test_a_rank_killed_in_a_save_leaves_no_checkpoint_and_the_run_goes_on(
    tool: Tool, tmp_path: Path, one_process: Path
) -> None:
    plan = ("Distributed.pp_degree=2", "Engine.save_load.save_steps=3")
    job, output = supervised(tool, tmp_path, 2, "1:6:kill_in_save", *plan)
    assert is_named(1, job, output, 2)
    assert "(global step 3)" in output  # the checkpoint of step 6 was not taken for one
    assert_same_losses(tmp_path / "run", one_process)
    assert {path.name for path in (tmp_path / "run").glob("epoch_*")} >= {"epoch_0_step_6", "epoch_0_step_8"}
    assert not list((tmp_path / "run").glob(".saving-*"))
