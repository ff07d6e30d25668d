"""Damaged bytes, and jobs in which one rank halts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppfleetx.config.parallel_plan import ParallelPlan
from tests.e2e.program import NANO, ROOT, values_of
from tests.helpers import programs
from tests.multinode.nodes import Node

_START_SECONDS = 120.0


# ---- damaged bytes


def flipped(content: bytes, rng: random.Random, times: int = 1) -> bytes:
    """``content`` with ``times`` random bits flipped."""
    changed = bytearray(content)
    for _ in range(times):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


# ---- jobs under Paddle's launcher, of which one rank halts


@dataclass
class Job:
    """The training program under one launcher per host.

    Attributes:
        program: script of the ranks; it writes ``reached`` into ``directory`` when the moment has come.
        plan: of all ranks.
        hosts: network namespaces; None is this machine.
        corpus: prefix of the training data.
        directory: for everything that the job writes.
        port: where launchers of several hosts meet.
        overrides: of the configuration, beside those of a small endless run.
        environment: for the ranks.
    """

    program: str
    plan: ParallelPlan
    hosts: Sequence[Node | None]
    corpus: Path
    directory: Path
    port: int
    overrides: Mapping[str, Any]
    environment: Mapping[str, str]
    launchers: list[programs.Popen] = field(init=False)

    def __post_init__(self) -> None:
        self.launchers = [self._start(number, host) for number, host in enumerate(self.hosts)]

    @property
    def per_host(self) -> int:
        return self.plan.world_size // len(self.hosts)

    def _start(self, number: int, host: Node | None) -> programs.Popen:
        endless = {"Engine.max_steps": 100000, **self.overrides}
        values = values_of(self.plan, self.corpus, self.directory / "run", overrides=endless)
        command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(self.per_host)]
        command += ["--log_dir", str(self.directory / f"log.{number}")]
        if host is not None:
            command += ["--master", f"{self.hosts[0].address}:{self.port}", "--nnodes", str(len(self.hosts))]
            command += ["--rank", str(number), "--host", host.address]
        command += [self.program, "-c", str(NANO)]
        command += [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        with (self.directory / f"launcher.{number}").open("w") as log:
            return programs.Popen(
                command if host is None else host.command(*command),
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                cwd=ROOT,
                start_new_session=True,
            )

    def await_halt(self) -> None:
        """Wait until the rank halts."""
        deadline = time.monotonic() + _START_SECONDS
        while not (self.directory / "reached").exists():
            ended = [launcher.poll() for launcher in self.launchers]
            assert ended == [None] * len(ended), f"ended before the moment ({ended}): {self.said()}"
            assert time.monotonic() < deadline, "the moment did not come"
            time.sleep(0.02)

    def wait_for_launchers(self, seconds: float) -> list[int]:
        """Exit codes of the launchers that end in time."""
        deadline, codes = time.monotonic() + seconds, []
        for launcher in self.launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes.append(launcher.wait(max(1.0, deadline - time.monotonic())))
        return codes

    def close(self, pids: Iterable[int]) -> None:
        """Kill every process that is left: the launchers, what they started, and ``pids``."""
        for launcher in self.launchers:
            for pid in (*_children_of(launcher.pid), *pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait(30)

    def log(self, rank: int) -> str:
        number, local = divmod(rank, self.per_host)
        return (self.directory / f"log.{number}" / f"workerlog.{local}").read_text(errors="replace")

    def said(self) -> str:
        logs = sorted(self.directory.glob("log.*/workerlog.*"))
        return "\n".join(path.read_text(errors="replace") for path in logs)


def _children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
