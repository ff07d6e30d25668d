"""`ppfleetx compare` and `ppfleetx plot` on files as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppfleetx.commands.main import call
from ppfleetx.config.errors import UserError

NAN = float("nan")
LINES = "".join(json.dumps({"kind": "train", "step": step, "loss": 5.0 - step}) + "\n" for step in (1, 2, 3))


def compare(tmp_path: Path, a: list[float], b: list[float], *options: str) -> int | None:
    words: list[str] = []
    for name, losses in (("a", a), ("b", b)):
        lines = [
            {"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0}
            for step, loss in enumerate(losses, 1)
        ]
        lines.insert(1, {"kind": "eval", "step": 1, "loss": 9.0})
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        words += [f"--metrics-{name}", str(tmp_path / name)]
    return call("compare", [*words, *options])


@pytest.mark.parametrize(
    ("one", "other", "options", "said"),
    [
        ([3.0, 2.0], [3.0, 2.0], ["--bitwise"], ""),
        ([3.0, 2.0], [3.0, 2.0000001], ["--bitwise"], "at step 2"),
        ([3.0, 2.0], [3.0, 2.0000001], [], ""),
        ([3.0, 2.0], [3.0, 2.001], [], "at step 2"),
        ([3.0, 2.0], [3.0, 2.001], ["--rtol", "1e-2"], ""),
        (
            [3.0, 2.0, 1.0],
            [3.0, 2.2, 1.0],
            [],
            "loss       differs by 9.091e-02",
        ),
        ([3.0, NAN, 2.0], [3.0, 2.5, 2.0], [], "at step 2"),
        ([3.0, NAN, 2.0], [3.0, NAN, 2.0], ["--bitwise"], ""),
    ],
)
def test_what_counts_as_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one: list, other: list, options: list, said: str
) -> None:
    assert compare(tmp_path, one, other, *options) == (1 if said else 0)
    assert said in capsys.readouterr().out


def test_runs_of_different_lengths_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="different steps"):
        compare(tmp_path, [3.0, 2.0], [3.0])


def plot(tmp_path: Path, text: str, output: str) -> bytes:
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text(text)
    call("plot", ["--metrics", str(tmp_path / "metrics.jsonl"), "--output", str(tmp_path / output)])
    return (tmp_path / output).read_bytes()


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    assert plot(tmp_path, LINES + '{"kind": "train", "st', "loss.png").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "output", "message"),
    [
        ("not json\n" + LINES, "loss.png", "metrics.jsonl:1 is not a record"),
        (LINES + "[]\n" + LINES, "loss.png", "metrics.jsonl:4 is not a record"),
        ("", "loss.png", "no training step"),
        (LINES, "nowhere/loss.png", "nowhere/loss.png.: its directory does not exist"),
        (LINES, "loss.xyz", "must end in .png"),
    ],
)
def test_pictures_that_cannot_be_drawn(tmp_path: Path, text: str, output: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plot(tmp_path, text, output)
