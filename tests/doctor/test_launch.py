"""What is looked at before the launcher runs, and libraries that cannot be used, planted for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppfleetx.commands.main import call
from ppfleetx.doctor import launch, libraries
from ppfleetx.doctor.launch import launched_rows, launcher_rows
from ppfleetx.doctor.libraries import broken_row
from ppfleetx.doctor.results import Status, fail
from tests.doctor.conftest import by_name
from tests.helpers.ranks import ROOT


def rows_of(environ: dict[str, str], nodes: int = 1, nproc: int | None = 2):
    return by_name(launcher_rows({"POD_IP": "127.0.0.1", **environ}, nodes, nproc))


def test_an_environment_in_which_ranks_can_start():
    assert rows_of({}) == rows_of({"CUDA_VISIBLE_DEVICES": "0,1"}) == {}
    assert rows_of({"PADDLE_TRAINER_ID": "1", "POD_IP": "203.0.113.9"}, nodes=2) == {}


@pytest.mark.parametrize(
    ("environ", "name", "found", "fix"),
    [
        ({"PADDLE_TRAINERS_NUM": "4"}, "launcher variables", "of another job", "unset PADDLE_TRAINERS_NUM"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, "CUDA_VISIBLE_DEVICES", "1 card for 2 processes", "--nproc 1"),
        ({"POD_IP": "203.0.113.9"}, "own address", "203.0.113.9 is not this machine's", "unset POD_IP"),
    ],
)
def test_what_of_the_environment_keeps_ranks_from_starting(environ, name, found, fix):
    row = rows_of(environ)[name]
    assert row.status is Status.FAIL and found in row.found and fix in row.fix


def doctor(*words: str, path: Path | None = None) -> tuple[int, dict[str, dict]]:
    """Exit code, and rows by name, of a real command; ``path`` comes first among the places of imports."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    environ["PYTHONPATH"] = f"{path}:{ROOT}" if path else str(ROOT)
    command = [sys.executable, "-m", "ppfleetx", "doctor", *words, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, {row["name"]: row for row in json.loads(done.stdout)["rows"]}


def package(place: Path, name: str, text: str) -> None:
    (place / name).mkdir()
    (place / name / "__init__.py").write_text(text)


@pytest.mark.parametrize("words", [[], ["--nproc", "2"]])
def test_a_library_that_cannot_be_imported_is_named_without_a_traceback(tmp_path, words):
    package(tmp_path, "pydantic", "raise ImportError('libfoo.so.1: cannot open shared object file')\n")
    code, rows = doctor(*words, path=tmp_path)
    row = rows["libraries"]
    assert code == 1 and "pydantic cannot be imported: ImportError: libfoo.so.1" in row["found"]
    assert "--force-reinstall pydantic" in row["cure"]


def test_a_paddle_that_ends_the_process_is_named(tmp_path):
    package(tmp_path, "paddle", "import os; os.abort()\n")
    code, rows = doctor(path=tmp_path)
    assert code == 1 and rows["import paddle"]["found"].startswith("ended by signal 6")
    assert "losses" not in rows


def test_the_environment_wins_over_the_options_as_it_does_for_the_launcher(monkeypatch):
    asked: list[tuple] = []
    monkeypatch.setattr(launch, "launcher_rows", lambda *told: asked.append(told[1:]) or [])
    failed = [fail("x", "x", "x")]
    monkeypatch.setattr(launch, "examine_nodes_first", lambda *told: asked.append(told[1]) or failed)
    monkeypatch.setenv("PADDLE_NNODES", "2")
    monkeypatch.setenv("PADDLE_MASTER", "10.0.0.1:7000")
    launch.job_rows([], 1, 3, "10.0.0.2:7000", seconds=1.0, log_dir=None)
    monkeypatch.delenv("PADDLE_NNODES")
    monkeypatch.delenv("PADDLE_MASTER")
    launch.job_rows([], 3, 2, "10.0.0.2:7000", seconds=1.0, log_dir=None)
    assert asked == [(2, 1), "10.0.0.1:7000", (2, 3), "10.0.0.2:7000"]


@pytest.mark.parametrize("words", [["--timeout", "soon"], ["--nproc", "two"]])
def test_a_number_that_is_none_is_named_in_words(words, capsys):
    with pytest.raises(SystemExit):
        call("doctor", words)
    said = capsys.readouterr().err
    assert words[1] in said and "invalid _" not in said


@pytest.mark.parametrize("version", ["2.3.5", "2.4.0", "1.25.1"])
def test_the_versions_that_are_required(monkeypatch, version):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    row = libraries._problem("numpy")
    assert (row is None) == (version == "2.3.5") and (row is None or "numpy<2.4,>=1.26" in row.fix)


def test_a_library_that_is_missing():
    row = broken_row(ModuleNotFoundError("No module named 'tiktoken'", name="tiktoken"))
    assert row.found == "tiktoken is not installed" and "pip install" in row.fix


# -- ranks that end without a report, or not at all -------------------------------------------------


@pytest.mark.parametrize(
    ("said", "code", "name", "found"),
    [
        ("ranks are torn", 7, "launcher", ["exit code 7", "ranks are torn"]),
        ("Container rank 1 status failed cmd ['x'] code -9 log x", 143, "rank 1", ["ended by signal 9"]),
    ],
)
def test_ranks_that_end_without_a_report_are_named(monkeypatch, tmp_path, said, code, name, found):
    monkeypatch.setattr(launch, "import_row", lambda: None)
    command = [sys.executable, "-c", f"print({said!r}); raise SystemExit({code})"]
    rows, size = launched_rows(command, seconds=1.0, log_dir=tmp_path)
    row = by_name(rows)[name]
    assert row.status is Status.FAIL and row.group == "processes" and size == 1
    assert all(piece in row.found for piece in found)


@pytest.mark.parametrize(("reported", "sleeps", "code"), [(1, "3", 0), (0, "60", signal.SIGTERM)])
def test_once_the_first_rank_has_reported_the_others_have_little_time(
    monkeypatch, tmp_path, reported, sleeps, code
):
    monkeypatch.setattr(launch, "_END_SECONDS", 0.2)
    launch.leave_report([fail("meeting", "is gone", "")], 2, str(tmp_path), reported)
    with (tmp_path / "log").open("wb") as log:
        assert launch._run(["sleep", sleeps], dict(os.environ), log.fileno(), 60.0, tmp_path) == code
