"""tools/plot_loss.py on files as runs leave them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = str(Path(__file__).resolve().parents[2] / "tools/plot_loss.py")
LINES = "".join(json.dumps({"kind": "train", "step": step, "loss": 5.0 - step}) + "\n" for step in (1, 2, 3))


def plot(metrics: Path, text: str, output: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("matplotlib")
    metrics.write_text(text)
    command = [sys.executable, TOOL, "--metrics", str(metrics), "--output", str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    done = plot(tmp_path / "metrics.jsonl", LINES + '{"kind": "train", "st', tmp_path / "loss.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "output", "message"),
    [
        ("not json\n" + LINES, "loss.png", "metrics.jsonl:1 is not a record"),
        (LINES + "[]\n" + LINES, "loss.png", "metrics.jsonl:4 is not a record"),
        ("", "loss.png", "no training step"),
        (LINES, "nowhere/loss.png", "nowhere/loss.png cannot be written: No such file"),
        (LINES, "loss.xyz", "must end in .png"),
    ],
)
def test_mistakes_end_in_one_message(tmp_path: Path, text: str, output: str, message: str) -> None:
    done = plot(tmp_path / "metrics.jsonl", text, tmp_path / output)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
