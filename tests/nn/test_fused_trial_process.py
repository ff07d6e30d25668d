"""Trials of fused operators in a child process. The CPU plays the card; a trial can make it fail."""

import json
import os
import signal
import subprocess

import paddle
import pytest

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn import fused_ops, fused_trial_process
from ppfleetx.nn.fused_ops import choose

HERE = "tests.nn.test_fused_trial_process"


def right(dtype):
    yield paddle.ones([1], dtype), paddle.ones([1], dtype)


def wrong(dtype):
    yield paddle.ones([1], dtype), 2 * paddle.ones([1], dtype)


def poisons(dtype):
    """Raise an error, after which every operation fails, like an illegal memory access on a card."""

    def gone(*_, **__):
        raise OSError("(External) CUDA error(700), an illegal memory access was encountered.")

    paddle.zeros = gone
    gone()


def tells_flags(dtype):
    raise RuntimeError(f"the level is {paddle.get_flags('FLAGS_check_nan_inf_level').popitem()[1]}")


def crashes(dtype):
    os.kill(os.getpid(), signal.SIGSEGV)


def tried(*names: str, device: str = "cpu") -> list[str | None]:
    trials = [(f"{HERE}:{name}", "float32") for name in names]
    return fused_trial_process.tried_in_child(trials, device, {"FLAGS_check_nan_inf_level": 3})


@pytest.mark.slow
def test_one_child_makes_the_trials_until_one_costs_it_the_card_or_its_life():
    found = tried("right", "wrong", "tells_flags", "poisons", "right", "crashes", "right")
    assert [found[number] for number in (0, 4, 6)] == [None] * 3
    said = {1: "differs from plain", 2: "the level is 3", 3: "CUDA error(700)", 5: "SIGSEGV"}
    for number, words in said.items():
        assert words in found[number]
    assert paddle.zeros([1]).item() == 0.0


def test_a_trial_that_does_not_end_is_given_up(monkeypatch):
    said = iter([fused_trial_process._SAID + "null\n", 2 * (fused_trial_process._SAID + "null\n")])

    def run(command, **_):
        out = f"{fused_trial_process._READY}\n{next(said)}".encode()
        if len(json.loads(command[-1])[0]) == 4:
            raise subprocess.TimeoutExpired(command, 120.0, output=out)
        return subprocess.CompletedProcess(command, 0, out, b"")

    monkeypatch.setattr(subprocess, "run", run)
    found = tried("right", "right", "right", "right")
    assert "did not end within" in found.pop(1) and found == [None] * 3


def test_a_card_that_takes_no_second_process_costs_speed_and_nothing_else():
    found = tried("right", "right", device="npu:0")
    assert len(found) == 2 and all(why.startswith("no trial could run: ") for why in found)


@pytest.mark.parametrize("device", ["gpu:3", "npu:0"])
def test_no_trial_is_made_in_the_process_that_trains(monkeypatch, device):
    own, asked = [], []
    monkeypatch.setattr(paddle, "get_device", lambda: device)
    monkeypatch.setattr(fused_ops, "kernel_types", lambda kernel, device: {"float32"})
    monkeypatch.setattr(fused_ops, "difference", lambda *_: own.append(1))

    def apart(trials, where, flags):
        asked.append((where, len(trials)))
        return [None if place.endswith(":rope") else "bad" for place, _ in trials]

    monkeypatch.setattr(fused_ops, "tried_in_child", apart, raising=False)
    monkeypatch.setattr(fused_ops, "_results", {}, raising=False)
    for _ in range(2):
        ops = choose("auto", ("float32",), ParallelContext.single(device))
    in_float32 = sum("float32" in row.types for row in fused_ops.TABLE.values())
    assert not own and asked == [(device, in_float32), (device, 0)]
    assert ops.taken == {"rope": ["float32"]} and "bad" in ops.refused["swiglu"]
