"""Schedules against the values Megatron's scheduler prints (max 1.5e-4, min 1e-5, W 3200, D 320000)."""

import json
import math
import re

import numpy as np
import pytest

from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.registries import SCHEDULES
from ppfleetx.config.sections.optimizer import LRConfig, OptimizerConfig, WeightDecayScheduleConfig
from ppfleetx.optims.schedules import Schedule, build_schedule, resume_schedule

MEGATRON = {"max_lr": 1.5e-4, "min_lr": 1e-5, "warmup_steps": 3200, "decay_steps": 320000}


@pytest.mark.parametrize(
    ("style", "step", "expected"),
    [
        ("cosine", 1, 4.6875e-08),
        ("cosine", 1600, 7.5e-05),
        ("cosine", 100000, 1.20150351e-04),
        ("cosine", 160000, 8.11106175e-05),
        ("linear", 100000, 1.07222222e-04),
        ("inverse_square_root", 100000, 2.68328157e-05),
        ("inverse_square_root", 320001, 1e-05),
        ("constant", 320001, 1.5e-4),
        ("cosine", 320000, 1e-05),
        ("linear", 10**7, 1e-05),
    ],
)
def test_values_of_megatron(style, step, expected):
    assert Schedule(**MEGATRON, decay_style=style).lr(step) == pytest.approx(expected, rel=2e-9)


@pytest.mark.parametrize(
    ("style", "expected"),
    [("exponential", 6.79898987e-05), ("linear", 8e-05), ("cosine", 8e-05), ("minus_sqrt", 5.10050506e-05)],
)
def test_wsd_of_megatron(style, expected):
    schedule = Schedule(**MEGATRON, decay_style="wsd", wsd_decay_steps=64000, wsd_decay_style=style)
    assert schedule.lr(288000) == pytest.approx(expected, rel=2e-9)
    assert schedule.lr(256000) == 1.5e-4
    assert schedule.lr(320000) == pytest.approx(1e-5)


def test_samples_are_counted_as_in_megatron():
    """Before a step, Megatron has counted its samples; its rate for the next one is the one of this step."""
    sizes = [2] * 5 + [4] * 5 + [8] * 10
    lr = LRConfig(unit="sample", max_lr=1.0, min_lr=0.1, warmup_steps=13, decay_steps=90)
    decay = WeightDecayScheduleConfig(start=0.0, end=0.1)
    schedule = build_schedule(OptimizerConfig(lr=lr, weight_decay_schedule=decay), length=sum(sizes))
    for step in range(1, len(sizes) + 1):
        num = sum(sizes[:step])
        if num <= 13:
            rate = 1.0 * num / 13
        elif num > 90:
            rate = 0.1
        else:
            rate = 0.1 + 0.9 * 0.5 * (math.cos(math.pi * (num - 13) / (90 - 13)) + 1)
        position = schedule.position(steps=step, samples=num)
        assert schedule.lr(position) == pytest.approx(rate, rel=1e-12)
        assert schedule.weight_decay(position) == pytest.approx(0.1 * num / sum(sizes))
    assert "at sample 90" in schedule.describe()


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"warmup_steps": 4, "decay_steps": 10}, {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0, 5: 5 / 6}),
        ({"decay_steps": 10}, {1: 0.9}),
        ({"min_lr": 0.1, "warmup_steps": 4, "decay_steps": 4}, {1: 0.25, 4: 1.0, 5: 0.1}),  # all warm-up
    ],
)
def test_first_step_is_not_zero_and_warmup_ends_at_the_peak(keys, rates):
    schedule = Schedule(max_lr=1.0, decay_style="linear", **keys)
    assert {step: schedule.lr(step) for step in rates} == pytest.approx(rates)


def test_weight_decay_ramps():
    ramp = {"max_lr": 1.0, "decay_steps": 10, "start_weight_decay": 0.0, "end_weight_decay": 0.1}
    linear = Schedule(**ramp, weight_decay_style="linear", weight_decay_steps=10)
    cosine = Schedule(**ramp, weight_decay_style="cosine", weight_decay_steps=10)
    assert linear.weight_decay(5) == pytest.approx(0.05)
    assert cosine.weight_decay(5) == pytest.approx(0.05)
    assert cosine.weight_decay(2) == pytest.approx(0.1 * 0.5 * (1 - 0.8090169943749475))
    assert linear.weight_decay(10) == cosine.weight_decay(11) == pytest.approx(0.1)
    assert Schedule(max_lr=1.0, decay_steps=10).weight_decay(3) == 0.01


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"warmup_steps": 320001}, "not exceed decay_steps"),
        ({"decay_style": "step"}, "one of"),
        ({"decay_style": "wsd"}, "between 1"),
        ({"decay_style": "wsd", "wsd_decay_steps": 319000}, "between 1"),
    ],
)
def test_impossible_schedules_are_refused(change, word):
    with pytest.raises(ConfigError, match=word):
        Schedule(**{**MEGATRON, **change})


@pytest.mark.parametrize(
    ("course", "said"),
    [
        (lambda n, schedule: None, "learning rate of step 5; it returns None"),
        (lambda n, schedule: float("nan") if n == 10 else 1.0, "learning rate of step 10; it returns nan"),
        (lambda n, schedule: "1e-4", "it returns '1e-4'"),
        (lambda n, schedule: -1.0, "finite number, 0 or more"),
        (lambda n, schedule: None if n == 7 else 1, "learning rate of step 7; it returns None"),
        (lambda n: 1.0, "does not take that: too many positional arguments"),
        (0.5, "was registered as 0.5"),
    ],
)
def test_a_schedule_of_ones_own_that_gives_no_rate_is_refused_with_its_name(monkeypatch, course, said):
    monkeypatch.setattr(SCHEDULES, "_entries", {**SCHEDULES._entries})
    SCHEDULES.register("own", course)
    section = OptimizerConfig(lr=LRConfig(decay_style="own", warmup_steps=4, decay_steps=10))
    with pytest.raises(ConfigError, match=r"Optimizer\.lr\.decay_style = 'own': .*" + re.escape(said)):
        build_schedule(section, length=20).lr(7)


def test_a_schedule_of_ones_own_may_give_a_number_of_numpy(monkeypatch):
    monkeypatch.setattr(SCHEDULES, "_entries", {**SCHEDULES._entries})
    SCHEDULES.register("own", lambda n, schedule: np.float32(0.25))
    section = OptimizerConfig(lr=LRConfig(decay_style="own", warmup_steps=4, decay_steps=10))
    assert json.dumps(build_schedule(section, length=20).lr(7)) == "0.25"  # metrics.jsonl has it


def test_state_round_trip_and_resume_policies():
    saved, configured = Schedule(**MEGATRON), Schedule(**{**MEGATRON, "max_lr": 3e-4})
    assert Schedule.from_state(saved.state()) == saved
    assert resume_schedule("strict", saved, saved.state()) == saved
    assert resume_schedule("checkpoint", configured, saved.state()) == saved
    assert resume_schedule("config", configured, saved.state()) == configured
    older = saved.state() | {"init_lr": 0.0}
    del older["unit"]
    assert resume_schedule("checkpoint", configured, older) == saved
    with pytest.raises(CheckpointError, match=r"max_lr: 0.0003 now, 0.00015 saved"):
        resume_schedule("strict", configured, saved.state())
    with pytest.raises(CheckpointError, match="this version cannot read"):
        resume_schedule("checkpoint", configured, {"max_lr": 1.0})


def test_describe_names_what_is_in_force():
    text = Schedule(**MEGATRON, decay_style="wsd", wsd_decay_steps=64000).describe()
    assert "wsd" in text and "0.00015" in text and "3200" in text and "64000" in text


def test_a_fraction_of_a_step_belongs_to_the_warm_up():
    """As in Megatron and FleetX, a warm-up of 0.25 of 10 steps has 2.5 steps."""
    lr = LRConfig(max_lr=1.0, warmup_rate=0.25, decay_steps=10, decay_style="linear")
    assert lr.warmup_length == 2.5
    schedule = build_schedule(OptimizerConfig(lr=lr), 10)
    assert [schedule.lr(step) for step in (1, 2)] == [0.4, 0.8]
    assert schedule.lr(3) == pytest.approx(1 - 0.5 / 7.5)
