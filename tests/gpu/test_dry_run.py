"""Without a GPU: the GPU tests say why they do not run, and, dry, some of them do. ``make gpu-test-dry``
runs all of them that way."""

import json
import sys

import pytest

from tests.gpu import place as places
from tests.gpu import report as reports
from tests.gpu.place import CARDS, DRY, Place
from tests.gpu.report import GpuReport
from tests.helpers import programs
from tests.helpers.ranks import ROOT, RankPool, shared_nursery

SHORT = [
    "tests/gpu/test_numbers.py::test_an_operator_gives_what_the_cpu_gives[linear-float32]",
    "tests/gpu/test_attention.py::test_dropped_weights_leave_their_expectation",
    "tests/gpu/test_communication.py::test_a_strided_tensor_is_refused",
    "tests/gpu/test_fused.py::test_an_operator_gives_what_its_composite_gives[weight_cast-bfloat16]",
]


@pytest.fixture
def look(monkeypatch):
    """``look()``: what the tests would run on with this environment."""
    monkeypatch.delenv(DRY, raising=False)
    monkeypatch.delenv(CARDS, raising=False)
    return places.place.__wrapped__


def test_without_a_gpu_the_reason_is_said(look, monkeypatch):
    monkeypatch.setattr(places, "expected_device", lambda wanted: "cpu")
    assert "compiled without CUDA" in look().obstacle
    monkeypatch.setattr(places, "expected_device", lambda wanted: "gpu")
    import paddle

    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 0)
    assert look().obstacle == "no GPU: Paddle is compiled with CUDA, but 0 devices are visible"
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 8)
    assert look() == Place("gpu", 8) and look().sizes(start=2) == [2, 4, 8]
    monkeypatch.setenv(CARDS, "4")
    assert look().sizes() == [1, 2, 4]
    monkeypatch.setenv(DRY, "1")
    assert look() == Place("cpu", 4)


def test_a_few_tests_run_dry_and_leave_a_report(tmp_path, monkeypatch):
    """In a pytest of their own, as a user starts it."""
    monkeypatch.setenv(DRY, "1")
    report = tmp_path / "found.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu"]
    done = programs.run([*command, "--gpu-report", report, *SHORT], timeout=280, executed=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["dry_run"] and found["outcomes"] == {"passed": len(SHORT)}
    assert {test["test"] for test in found["tests"]} == set(SHORT)
    assert found["tests"][0]["numbers"]["worst"] < 1e-5
    assert found["machine"]["paddle"]["version"] and DRY in found["machine"]["environment"]
    text = report.with_suffix(".txt").read_text()
    assert "CPU ranks in the place of cards (dry run): 4 passed" in text and "attach" in text


def test_a_rank_may_import_paddle_by_itself():
    """As a rank on a card does."""
    pool = RankPool(shared_nursery(), 1, executed=True)
    try:
        assert pool.run("tests.gpu.cases.numbers:where_it_runs") == [["cpu", True]]
    finally:
        pool.close()


def test_what_is_in_host_memory_is_no_read_from_a_card():
    """Paddle keeps AdamW's powers of beta there: 100 of them are looked at in a step of this model."""
    run = {"plan": {}, "world_size": 1, "model": "gpt", "optimizer": "adamw", "micro_batch_size": 4}
    pool = RankPool(shared_nursery(), 1)
    try:
        (here,) = pool.run("tests.gpu.cases.repeats:reads_of_a_step", device="cpu", **run)
        (there,) = pool.run("tests.gpu.cases.repeats:reads_on_branches_of_a_card", **run)
    finally:
        pool.close()
    assert 0 < there["reads"] <= here["reads"], (there, here)


def test_failures_come_first_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "place", lambda: Place("gpu", 2))
    report = GpuReport(tmp_path / "found.json")
    for name, outcome, when, told in (
        ("fine", "passed", "setup", None),
        ("fine", "passed", "call", None),
        ("fine", "passed", "teardown", None),
        ("wrong", "failed", "call", "E  AssertionError: 0.3 is too much"),
        ("unfit", "skipped", "setup", ("conftest.py", 1, "Skipped: needs 4 cards, 2 visible")),
        ("broken", "failed", "setup", "E  a rank did not start"),
    ):
        numbers = [("worst", 0.25)]
        place = ("tests/gpu/test_x.py", 1, name)
        report.pytest_runtest_logreport(
            pytest.TestReport(name, place, {"gpu": 1}, outcome, told, when, user_properties=numbers)
        )
    report.pytest_runtest_logreport(pytest.TestReport("other", place, {}, "failed", "no GPU test", "call"))
    report.pytest_sessionfinish()
    found = json.loads(report.path.read_text())
    assert {test["test"]: test["outcome"] for test in found["tests"]} == {
        "fine": "passed",
        "wrong": "failed",
        "unfit": "skipped",
        "broken": "error",
    }
    assert found["tests"][0]["numbers"] == {"worst": 0.25} and found["cards"] == 2
    text = report.text_path.read_text()
    assert "2 cards: 1 error, 1 failed, 1 passed, 1 skipped" in text
    places = [text.index(word) for word in ("failed: 1", "0.3 is too much", "passed: 1", "needs 4 cards")]
    assert places == sorted(places)
