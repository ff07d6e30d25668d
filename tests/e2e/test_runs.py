"""Several runs with one output directory: none loses another's files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ppfleetx.checkpoint.run_ownership import read_run, run_of
from tests.e2e.conftest import ROOT, TRAIN, Tool, environment, losses
from tests.helpers import programs
from tests.helpers.waiting import wait_for

SHORT = ("Engine.max_steps=3", "Engine.save_load.save_steps=1", "Engine.eval_freq=0")


def content(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture
def used(tool: Tool, tmp_path: Path) -> Path:
    """Output directory of a run of three steps with two checkpoints left."""
    output_dir = tmp_path / "used"
    tool.ok(output_dir, *SHORT, "Engine.save_load.keep_max=2")
    assert {path.name for path in output_dir.glob("epoch_*")} == {"epoch_0_step_2", "epoch_0_step_3"}
    return output_dir


def test_a_second_run_is_refused_then_overwrites_or_goes_on(tool: Tool, used: Path) -> None:
    before, run = content(used), read_run(used).run
    assert {run_of(path) for path in used.glob("epoch_*")} == {run}
    again = tool.refused(used, *SHORT, "Engine.save_load.keep_max=1")
    check = [*tool.command(TRAIN, used, *SHORT), "--check"]
    checked = programs.run(check, timeout=120, env=environment())
    assert (checked.returncode, checked.stdout) == (2, ""), "it said that all is well"
    for said in (again, checked.stderr):
        assert "already holds a run (2 checkpoints, epoch_0_step_2 to epoch_0_step_3" in said
    assert content(used) == before

    resume = ("Engine.max_steps=4", "Engine.eval_freq=0", "Engine.save_load.resume=auto")
    assert "lr_schedule" in tool.refused(used, *resume), "the schedule follows from max_steps"
    tool.ok(used, *resume, "Engine.save_load.lr_schedule=config")
    assert read_run(used).run == run

    tool.ok(used, "Engine.max_steps=2", "Engine.eval_freq=0", "Engine.save_load.overwrite=True")
    assert {path.name for path in used.glob("epoch_*")} == {"epoch_0_step_2"}
    assert run_of(used / "epoch_0_step_2") == read_run(used).run != run
    assert [step for step, *_ in losses(used)] == [1, 2]


def test_two_runs_started_at_once(tool: Tool, tmp_path: Path) -> None:
    """One of them trains, the other is refused; what is there is all of one run."""
    seeds = (1, 2)
    jobs = [
        programs.Popen(
            tool.command(TRAIN, tmp_path / "run", *SHORT, f"Global.seed={seed}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for seed in seeds
    ]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert sorted(job.returncode for job in jobs) == [0, 2], outputs
    winner = [job.returncode for job in jobs].index(0)
    refusal = outputs[1 - winner][1]
    assert "another run is training in this directory" in refusal or "already holds a run" in refusal
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["Global"]["seed"] == seeds[winner]
    assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2, 3]
    runs = {run_of(path) for path in (tmp_path / "run").glob("epoch_*")}
    assert runs == {read_run(tmp_path / "run").run}


def test_a_runs_configuration_is_used_again(tool: Tool, used: Path, tmp_path: Path) -> None:
    """To go on with the run, and on a run that was started from its weights."""
    config = used / "config.yaml"
    train, evaluate = ([sys.executable, str(ROOT / tool), "-c"] for tool in (TRAIN, "tools/eval.py"))
    done = programs.ok([*train, config])
    assert "nothing to train: 3 of 3 steps" in done.stdout, done.stderr
    two = ("--check", "-o", "Distributed.mp_degree=2", "-o", "Global.micro_batch_size=1")
    checked = programs.ok([*train, config, *two])
    assert "mp 2" in checked.stdout
    assert "local 4 = micro 1 x accumulate 4" in checked.stdout

    output_dir = tmp_path / "started"
    tool.ok(output_dir, *SHORT, f"Engine.save_load.init_from={used}", config=config)
    written = yaml.safe_load((output_dir / "config.yaml").read_text())["Engine"]["save_load"]
    assert written["init_from"] == str(used / "epoch_0_step_3"), "latest may name another one later"
    last = ("-o", f"Engine.save_load.ckpt_dir={output_dir}")
    assert "eval at global step 3" in programs.ok([*evaluate, output_dir / "config.yaml", *last]).stdout
    assert "nothing to train" in programs.ok([*train, output_dir / "config.yaml"]).stdout


def test_a_run_that_branched_off_goes_on_without_its_source(tool: Tool, used: Path, tmp_path: Path) -> None:
    """Which the run that made it may delete meanwhile."""
    options = (*SHORT[1:], "Engine.max_steps=4", "Engine.save_load.lr_schedule=config")
    branch = (*options, f"Engine.save_load.ckpt_dir={used}", "Engine.save_load.resume=auto")
    tool.ok(tmp_path / "branch", *branch)
    shutil.rmtree(used)
    done = tool.ok(tmp_path / "branch", *branch)
    assert "nothing to train: 4 of 4 steps" in done.stdout, done.stderr
    said = tool.refused(tmp_path / "another", *branch)
    assert "there is no directory" in said


def test_killed_before_its_first_checkpoint(tool: Tool, tmp_path: Path) -> None:
    """The same command begins again, as the same run and with one record of it."""
    metrics, before, runs = tmp_path / "metrics.jsonl", b"", set()
    long = ("Engine.max_steps=100000", "Engine.save_load.save_steps=null", "Engine.eval_freq=0")
    command = tool.command(TRAIN, tmp_path, *long, "Engine.save_load.resume=auto")
    for _ in range(2):
        process = programs.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
        )
        try:
            wait_for(lambda: first_line(metrics) not in (b"", before), 90, running=[process])  # noqa: B023
        finally:
            process.kill()
            process.wait()
        before = first_line(metrics)
        assert losses(tmp_path)[0][0] == 1
        runs.add(read_run(tmp_path).run)
    assert len(runs) == 1
    assert not list(tmp_path.glob("metrics.*.jsonl"))


def first_line(path: Path) -> bytes:
    """With its end; nothing while it has none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    return content[: content.find(b"\n") + 1]
