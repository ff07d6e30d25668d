"""A toy corpus, and fixtures that run the project's tools on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.program import NANO, ROOT, losses, records
from tests.helpers import programs

__all__ = ["NANO", "ROOT", "losses", "records"]  # for the tests of this room and others

LLAMA_NANO = ROOT / "ppfleetx/configs/debug/llama_nano.yaml"


class Tool:
    """Runs one of the project's tools on the toy corpus in a separate process.

    Processes are forked (``tests/helpers/programs.py``); those asked for with ``executed`` are started as a
    user starts them.
    """

    def __init__(self, corpus: Path) -> None:
        self._corpus = corpus

    def command(self, script: str, output_dir: Path, *overrides: str, config: Path = NANO) -> list[str]:
        given = [
            f"Data.Train.dataset.input_dir={self._corpus}",
            f"Data.Eval.dataset.input_dir={self._corpus}",
            f"Engine.save_load.output_dir={output_dir}",
            *overrides,
        ]
        options = [word for override in given for word in ("-o", override)]
        return [sys.executable, str(ROOT / script), "-c", str(config), *options]

    def run(
        self,
        output_dir: Path,
        *overrides: str,
        script: str = "tools/train.py",
        config: Path = NANO,
        executed: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        command = self.command(script, output_dir, *overrides, config=config)
        return programs.run(command, timeout=120, env=environment(), executed=executed)

    def ok(self, output_dir: Path, *overrides: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """:meth:`run`; asserts that it succeeds."""
        done = self.run(output_dir, *overrides, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def refused(self, output_dir: Path, *overrides: str, **options: Any) -> str:
        """:meth:`run`; asserts that it exits with a user's error, and returns the message."""
        done = self.run(output_dir, *overrides, **options)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
        return done.stderr

    def stop_after(self, output_dir: Path, num_steps: int, number: signal.Signals, *overrides: str) -> str:
        """Start training, send the signal once ``num_steps`` steps are recorded, return what was printed."""
        command = self.command("tools/train.py", output_dir, *overrides)
        process = programs.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        deadline = time.monotonic() + 90
        try:
            while len(losses(output_dir)) < num_steps and process.poll() is None:
                assert time.monotonic() < deadline, "training did not get that far"
                time.sleep(0.005)
            process.send_signal(number)
            return process.communicate(timeout=60)[0]
        finally:
            process.kill()


def environment() -> dict[str, str]:
    """One thread, so that tests do not slow each other down; two threads give the same results."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def tool(corpus: Path) -> Tool:
    return Tool(corpus)


FOUR_STEPS = ("Engine.max_steps=4", "Engine.save_load.save_steps=2", "Engine.eval_freq=0")


@pytest.fixture(scope="session")
def plain(tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory of four steps of plain training."""
    output_dir = tmp_path_factory.mktemp("plain") / "run"
    tool.ok(output_dir, *FOUR_STEPS)
    return output_dir
