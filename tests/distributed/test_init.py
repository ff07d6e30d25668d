"""Settings of a process before its first operation: Paddle flags and TF32."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from paddle.base import core

from ppfleetx.commands import initialize
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.distributed import init
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.device import OVERRIDE, allow_tf32
from ppfleetx.distributed.init import init_distributed

NANO = Path(__file__).resolve().parents[2] / "ppfleetx/configs/debug/gpt_nano.yaml"


@pytest.mark.parametrize(
    ("flag", "rule"),
    [("FLAGS_no_such_flag=1", "has no such flag"), ("FLAGS_check_nan_inf=often", "does not take it")],
)
def test_a_flag_paddle_does_not_take_is_named(flag: str, rule: str) -> None:
    cfg = load_config(NANO, [f"Global.flags.{flag}"])
    name, _, value = flag.partition("=")
    with pytest.raises(ConfigError, match=rule) as caught:
        init_distributed(cfg)
    assert caught.value.key == f"Global.flags.{name}"
    assert str(caught.value.value) == value
    assert caught.value.place == "-o override 1"


@pytest.fixture(autouse=True)
def switches(monkeypatch):
    """Restore Paddle's switches, which CPU builds have too."""
    monkeypatch.delenv(OVERRIDE, raising=False)
    before = core.get_cublas_switch(), core.get_cudnn_switch()
    yield lambda: (core.get_cublas_switch(), core.get_cudnn_switch())
    core.set_cublas_switch(before[0])
    core.set_cudnn_switch(before[1])


@pytest.mark.parametrize(
    ("theirs", "allowed", "words"),
    [
        (None, True, "rounded to TF32 where the GPU can (Global.allow_tf32 = True)"),
        (None, False, "exact, without TF32 (Global.allow_tf32 = False)"),
        ("0", True, "TF32 is off, NVIDIA_TF32_OVERRIDE=0 overrides Global.allow_tf32"),
        ("1", False, "TF32 is on, NVIDIA_TF32_OVERRIDE=1 overrides Global.allow_tf32"),
        ("0", False, "exact"),
        ("1", True, "rounded to TF32"),
    ],
)
def test_the_switches_follow_and_what_the_environment_overrides_is_said(
    monkeypatch, switches, theirs, allowed, words
):
    if theirs is not None:
        monkeypatch.setenv(OVERRIDE, theirs)
    for value in (not allowed, allowed):
        said = allow_tf32(value)
        assert switches() == (value, value)
    assert words in said


@pytest.mark.parametrize(("device", "allowed"), [("gpu", True), ("gpu", False), ("cpu", False)])
def test_it_is_said_at_the_start_on_a_gpu(monkeypatch, caplog, switches, device, allowed):
    started = replace(ParallelContext.single(), device=device)
    monkeypatch.setattr(init, "init_distributed", lambda cfg: started)
    cfg = load_config(NANO, [f"Global.allow_tf32={allowed}"])
    logger = logging.getLogger("ppfleetx")
    monkeypatch.setattr(initialize, "configure_logging", lambda quiet: logger)
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO):
        assert initialize.start_with(cfg) == (cfg, started)
    assert switches() == (allowed, allowed)
    said = [line for line in caplog.messages if line.startswith("float32 matrix products: ")]
    assert len(said) == (device == "gpu")
