"""Steps of GPT and Llama against committed losses, and that a fault in the arithmetic is found."""

from __future__ import annotations

import json

import paddle
import pytest

from ppfleetx.doctor import steps
from ppfleetx.doctor.check import Status, Target
from tests.doctor.conftest import by_name


def test_losses_are_those_that_are_committed_and_a_wrong_kernel_is_found(monkeypatch):
    rows = by_name(steps.losses(Target()))
    assert rows["GPT float32"].status is rows["Llama float32"].status is Status.OK
    assert rows["Llama 16 bits"].status is Status.SKIPPED
    right = paddle.nn.functional.softmax
    monkeypatch.setattr(steps, "MODELS", {"Llama": steps.MODELS["Llama"]})
    monkeypatch.setattr(paddle.nn.functional, "softmax", lambda x, *a, **k: right(x, *a, **k) * 1.01)
    row = by_name(steps.losses(Target()))["Llama float32"]
    assert row.status is Status.FAIL and row.numbers["relative_error"] > steps.TOLERANCE["cpu"]
    assert "another version of Paddle" in row.fix


def test_a_loss_that_is_no_number_is_found():
    golden = json.loads(steps.GOLDEN.read_text())["losses"]["GPT"]
    assert steps.losses_row("GPT", golden, golden, 1e-5).status is Status.OK
    assert steps.losses_row("GPT", [golden[0], float("nan"), 0.0], golden, 1e-5).status is Status.FAIL
    assert steps.losses_row("GPT", [loss * (1 + 2e-5) for loss in golden], golden, 1e-5).status is Status.FAIL


@pytest.mark.parametrize("model", list(steps.MODELS))
def test_the_committed_losses_name_their_recipe(model):
    content = json.loads(steps.GOLDEN.read_text())
    assert "make_doctor_losses.py" in content["recipe"]
    assert len(content["losses"][model]) == steps.STEPS
