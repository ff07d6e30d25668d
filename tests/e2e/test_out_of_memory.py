"""A run that is out of memory ends with one message and exit code 5."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import Tool, environment
from tests.helpers import programs

PLUGIN = """
import paddle

from ppfleetx.config.registries import CALLBACKS
from ppfleetx.core.engine.callbacks.base import Callback


@CALLBACKS.register("glutton")
class Glutton(Callback):
    def __init__(self, setup):
        pass

    def on_step_end(self, run, record):
        if record.step == 2:
            paddle.ones([10**8, 10**6])
"""


def test_it_ends_with_one_message(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "glutton.py").write_text(PLUGIN)
    command = tool.command("tools/train.py", tmp_path / "run", "Engine.callbacks=[default, glutton]")
    settings = {**environment(), "PYTHONPATH": str(tmp_path)}
    done = programs.run([*command, "--plugin", "glutton"], timeout=120, env=settings)
    assert done.returncode == 5, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "error:" in line]
    assert line.startswith("error: out of memory (between two steps, step 2): Fail to alloc memory of 4")
    assert "Predicted memory at the peak: " in done.stderr
    assert "Traceback" not in done.stderr
