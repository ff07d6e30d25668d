"""`ppfleetx compare` and `ppfleetx plot` on files as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppfleetx.commands.main import call
from ppfleetx.config.errors import UserError

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
    ("other", "options", "code"),
    [
        ([3.0, 2.0], ["--bitwise"], 0),
        ([3.0, 2.0000001], ["--bitwise"], 1),
        ([3.0, 2.0000001], [], 0),
        ([3.0, 2.001], [], 1),
        ([3.0, 2.001], ["--rtol", "1e-2"], 0),
        ([3.0, float("nan")], [], 1),
    ],
)
def test_what_counts_as_equal(tmp_path: Path, other: list[float], options: list[str], code: int) -> None:
    assert compare(tmp_path, [3.0, 2.0], other, *options) == code


def test_a_step_without_a_finite_loss_in_one_run_is_a_difference_though_later_ones_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, [3.0, float("nan"), 2.0], [3.0, 2.5, 2.0]) == 1
    assert "at step 2" in capsys.readouterr().out


def test_the_same_steps_without_a_finite_loss_are_equal(tmp_path: Path) -> None:
    assert compare(tmp_path, [3.0, float("nan"), 2.0], [3.0, float("nan"), 2.0], "--bitwise") == 0


@pytest.mark.parametrize(
    ("other", "options", "said"),
    [([3.0], [], "different steps"), ([3.0, 2.0], ["--bitwise", "--rtol", "1e-2"], "--rtol")],
)
def test_what_cannot_be_compared(tmp_path: Path, other: list[float], options: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        compare(tmp_path, [3.0, 2.0], other, *options)


def test_names_quantity_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(tmp_path, [3.0, 2.0, 1.0], [3.0, 2.2, 1.0])
    assert "loss       differs by 9.091e-02 (relative) at most, at step 2" in capsys.readouterr().out


def plot(tmp_path: Path, text: str, output: str) -> Path:
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text(text)
    call("plot", ["--metrics", str(tmp_path / "metrics.jsonl"), "--output", str(tmp_path / output)])
    return tmp_path / output


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    picture = plot(tmp_path, LINES + '{"kind": "train", "st', "loss.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


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
def test_pictures_that_cannot_be_drawn(tmp_path: Path, text: str, output: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plot(tmp_path, text, output)
