"""tools/loss_compare.py on runs that exist: what counts as equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = str(Path(__file__).resolve().parents[2] / "tools/loss_compare.py")


def write_run(directory: Path, losses: list[float]) -> Path:
    directory.mkdir()
    lines = [
        {"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, 1)
    ]
    lines.insert(1, {"kind": "eval", "step": 1, "loss": 9.0})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def compare(
    tmp_path: Path, a: list[float], b: list[float], *options: str
) -> subprocess.CompletedProcess[str]:
    runs = [write_run(tmp_path / name, losses) for name, losses in (("a", a), ("b", b))]
    command = [sys.executable, TOOL, "--metrics-a", str(runs[0]), "--metrics-b", str(runs[1]), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("other", "options", "code"),
    [
        ([3.0, 2.0], ["--bitwise"], 0),
        ([3.0, 2.0000001], ["--bitwise"], 1),
        ([3.0, 2.0000001], [], 0),
        ([3.0, 2.001], [], 1),
        ([3.0, 2.001], ["--rtol", "1e-2"], 0),
        ([3.0, float("nan")], [], 1),
        ([3.0], [], 2),
        ([3.0, 2.0], ["--bitwise", "--rtol", "1e-2"], 2),
    ],
)
def test_exit_code(tmp_path: Path, other: list[float], options: list[str], code: int) -> None:
    done = compare(tmp_path, [3.0, 2.0], other, *options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_names_quantity_and_step(tmp_path: Path) -> None:
    done = compare(tmp_path, [3.0, 2.0, 1.0], [3.0, 2.2, 1.0])
    assert "loss       differs by 9.091e-02 (relative) at most, at step 2" in done.stdout
