"""A toy corpus, and fixtures that run the project's tools on it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.program import NANO, ROOT, losses, records
from tests.helpers import programs
from tests.helpers.programs import one_thread as environment
from tests.helpers.waiting import wait_for

__all__ = ["NANO", "ROOT", "environment", "losses", "records"]  # for the tests of this room and others

TRAIN = "tools/train.py"
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

    def ok(
        self, output_dir: Path, *overrides: str, config: Path = NANO, script: str = TRAIN, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the tool; asserts that it succeeds."""
        return programs.ok(self.command(script, output_dir, *overrides, config=config), **options)

    def refused(
        self, output_dir: Path, *overrides: str, config: Path = NANO, script: str = TRAIN, **options: Any
    ) -> str:
        """Run the tool; asserts that it exits with a user's error, and returns the message."""
        return programs.refused(self.command(script, output_dir, *overrides, config=config), **options)

    def stop_after(self, output_dir: Path, num_steps: int, number: signal.Signals, *overrides: str) -> str:
        """Start training, send the signal once ``num_steps`` steps are recorded, return what was printed."""
        command = self.command("tools/train.py", output_dir, *overrides)
        process = programs.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        try:
            wait_for(lambda: len(losses(output_dir)) >= num_steps or process.poll() is not None, 90)
            process.send_signal(number)
            return process.communicate(timeout=60)[0]
        finally:
            process.kill()


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
