"""Two nodes with dp 2 across them and mp 2 within each give the results of one process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Tool, environment, losses, tool  # noqa: F401  (fixtures)
from tests.helpers import programs
from tests.helpers.waiting import wait_for
from tests.multinode.nodes import Node, finish

OVERRIDES = (
    "Global.global_batch_size=8",
    "Global.local_batch_size=null",
    "Model.hidden_dropout_prob=0",
    "Model.attention_probs_dropout_prob=0",
)


def start(tool: Tool, node: Node, master: str, output_dir: Path, *overrides: str, **environ: str):  # noqa: F811
    """Start a node's launcher. Without ``environ``, the master is started as users do it, and the others are
    forked."""
    executed = not environ and master.startswith(f"{node.address}:")
    popen = subprocess.Popen if executed else programs.Popen
    script = "tests/e2e/faulty_train.py" if "FAULT" in environ else "tools/train.py"
    program = tool.command(script, output_dir, *OVERRIDES, "Distributed.mp_degree=2", *overrides)
    launcher = ["-m", "paddle.distributed.launch", "--master", master, "--nnodes", "2"]
    launcher += ["--host", node.address, "--nproc_per_node", "2"]
    launcher += ["--log_dir", f"{output_dir}_log_{node.name}"]
    return popen(
        node.command(sys.executable, *launcher, *program[1:]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(), **environ},
        cwd=ROOT,
        start_new_session=True,
    )


def test_two_nodes_train_as_one_process(tool: Tool, tmp_path: Path, nodes) -> None:  # noqa: F811
    tool.ok(tmp_path / "one", *OVERRIDES)
    master = f"{nodes[0].address}:38517"
    jobs = [start(tool, node, master, tmp_path / "two") for node in nodes]
    results = finish(jobs, 120)
    for code, output in results:
        assert code == 0, output
    assert "dp 2, mp 2, pp 1" in results[0][1]
    got, expected = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(got) == len(expected) == 8
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    # Two addresses took part: the second node's ranks are 2 and 3.
    second = (tmp_path / f"two_log_{nodes[1].name}" / "envlog.0").read_text()
    assert "PADDLE_TRAINER_ID=2" in second
    assert f"PADDLE_CURRENT_ENDPOINT={nodes[1].address}:" in second


def test_a_rank_killed_on_one_node_ends_both(tool: Tool, tmp_path: Path, nodes) -> None:  # noqa: F811
    master = f"{nodes[0].address}:38519"
    jobs = [start(tool, node, master, tmp_path / "two", FAULT="3:3:kill") for node in nodes]
    started = time.monotonic()
    results = finish(jobs, 60)
    assert all(code != 0 for code, _ in results)
    assert time.monotonic() - started < 45
    assert re.search(r"rank 3 at 10\.77\.0\.2:\d+ is gone", results[0][1])
    assert "Container rank 1" in results[1][1]  # the launcher counts the ranks of its node


@pytest.mark.slow
def test_a_stopped_rank_is_waited_for_and_an_unplugged_host_is_not(
    tool: Tool,  # noqa: F811
    tmp_path: Path,
    nodes,
) -> None:
    master = f"{nodes[0].address}:38521"
    endless = ("Engine.max_steps=100000", "Engine.eval_freq=0", "Engine.save_load.save_steps=null")
    settings = {"PADDLE_CPU_COMM_SILENCE": "3"}
    jobs = [start(tool, node, master, tmp_path / "two", *endless, **settings) for node in nodes]
    try:
        await_steps(tmp_path / "two", 3, jobs)
        stopped = rank_of(tmp_path / f"two_log_{nodes[1].name}", 1)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(8)
        os.kill(stopped, signal.SIGCONT)
        await_steps(tmp_path / "two", len(losses(tmp_path / "two")) + 3, jobs)
        nodes[1].unplug()
        started = time.monotonic()
    finally:
        results = finish(jobs, 60)
    assert time.monotonic() - started < 30
    for number, (code, output) in enumerate(results):
        assert code == 3, output
        assert "Traceback" not in output
        host = nodes[1 - number].address
        assert re.search(rf"error: rank \d: .*rank \d at {host}:\d+ is gone: no sign of life", output), output


def await_steps(output_dir: Path, number: int, jobs: list[subprocess.Popen]) -> None:
    """Wait until so many steps are recorded."""
    wait_for(lambda: len(losses(output_dir)) >= number, 60, running=jobs)


def rank_of(log_dir: Path, local_rank: int) -> int:
    """The process of a rank, found by its log file."""
    log = str(log_dir / f"workerlog.{local_rank}")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd/1") == log:
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"nobody writes {log}")
