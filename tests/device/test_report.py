"""Which device the tests of this folder run on, why they do not, and the report that they leave."""

import json
import sys
from contextlib import closing

import pytest

from ppfleetx.distributed import device
from tests.device import place as places
from tests.device import reference
from tests.device import report as reports
from tests.device.place import CARDS, DEVICE, REFERENCE, Place
from tests.device.report import DeviceReport
from tests.helpers import programs
from tests.helpers.ranks import ROOT, RankPool, shared_nursery

SHORT = "tests/device/test_numbers.py::test_an_operator_gives_what_the_cpu_gives[linear-float32]"


@pytest.fixture
def look(monkeypatch):
    """``look()``: what the tests would run on with this environment."""
    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.delenv(CARDS, raising=False)
    return places.place.__wrapped__


def test_without_a_name_some_plans_run_on_the_reference_device(look, monkeypatch):
    monkeypatch.setattr(reference, "obstacle", lambda: "")
    monkeypatch.setattr(reference, "environment", lambda: {"A": "1"})
    found = look()
    assert found.is_reference and found.is_short and found.sizes() == [1, 2]
    monkeypatch.setenv(DEVICE, REFERENCE)
    assert not look().is_short and look().sizes(start=2) == [2, 4] and look().environment == {"A": "1"}
    monkeypatch.setattr(reference, "obstacle", lambda: "written for another processor")
    assert look().obstacle == "written for another processor"


def test_cards_that_are_not_there_are_the_reason(look, monkeypatch):
    monkeypatch.setenv(DEVICE, "gpu")
    monkeypatch.setattr(device, "count", lambda kind: 0)
    assert "sees no gpu" in look().obstacle
    monkeypatch.setattr(device, "count", lambda kind: 8)
    assert look().cards == 8 and look().sizes(start=2) == [2, 4, 8]
    monkeypatch.setenv(CARDS, "4")
    assert look().sizes() == [1, 2, 4]


@pytest.mark.slow
def test_a_test_leaves_a_report(tmp_path):
    """In a pytest of their own, as a user starts it."""
    if reference.obstacle():
        pytest.skip(reference.obstacle())
    report = tmp_path / "found.json"
    options = ["-p", "no:cacheprovider", "-m", "device", "--device", REFERENCE, "--device-report", report]
    command = [sys.executable, "-m", "pytest", *options, SHORT]
    programs.ok(command, timeout=280, executed=True, cwd=ROOT)
    found = json.loads(report.read_text())
    assert found["is_reference"] and found["outcomes"] == {"passed": 1}
    [test] = found["tests"]
    assert test["test"] == SHORT and test["numbers"]["worst"] < 1e-5
    assert found["machine"]["paddle"]["version"]
    assert "cards of the reference device: 1 passed" in report.with_suffix(".txt").read_text()


def test_a_rank_may_import_paddle_by_itself():
    """As a rank on a card does."""
    with closing(RankPool(shared_nursery(), 1, executed=True)) as pool:
        assert pool.run("tests.device.cases.numbers:where_it_runs") == [["cpu", True]]


def test_what_is_in_host_memory_is_no_read_from_a_card():
    """Paddle keeps AdamW's powers of beta there: 100 of them are looked at in a step of this model."""
    run = {"plan": {}, "world_size": 1, "model": "gpt", "optimizer": "adamw", "micro_batch_size": 4}
    with closing(RankPool(shared_nursery(), 1)) as pool:
        (here,) = pool.run("tests.device.cases.repeats:reads_of_a_step", device="cpu", **run)
        (there,) = pool.run("tests.device.cases.repeats:reads_on_branches_of_a_card", **run)
    assert 0 < there["reads"] <= here["reads"], (there, here)


def test_failures_come_first_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "place", lambda: Place("gpu", 2))
    report = DeviceReport(tmp_path / "found.json")
    for name, outcome, when, told in (
        ("fine", "passed", "setup", None),
        ("fine", "passed", "call", None),
        ("fine", "passed", "teardown", None),
        ("wrong", "failed", "call", "E  AssertionError: 0.3 is too much"),
        ("unfit", "skipped", "setup", ("conftest.py", 1, "Skipped: needs 4 cards, 2 visible")),
        ("broken", "failed", "setup", "E  a rank did not start"),
    ):
        numbers = [("worst", 0.25)]
        place = ("tests/device/test_x.py", 1, name)
        report.pytest_runtest_logreport(
            pytest.TestReport(name, place, {"device": 1}, outcome, told, when, user_properties=numbers)
        )
    report.pytest_runtest_logreport(
        pytest.TestReport("other", place, {}, "failed", "no test of a device", "call")
    )
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
    assert "2 cards of gpu: 1 error, 1 failed, 1 passed, 1 skipped" in text
    places = [text.index(word) for word in ("failed: 1", "0.3 is too much", "passed: 1", "needs 4 cards")]
    assert places == sorted(places)
