"""Callbacks that a plugin wrote without knowing how they are called."""

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.engine import CallbackConfig
from ppfleetx.core.engine.callbacks import build
from ppfleetx.core.engine.callbacks.base import Callback
from ppfleetx.core.engine.callbacks.metrics import check_options

NAMED = CallbackConfig(name="metrics")


class WithoutSetup(Callback):
    """Has no constructor, and so takes no setup."""


class WithStrangeHook(Callback):
    def on_step_begin(self, run):
        """Nothing calls this."""


def test_a_callback_that_takes_no_setup_is_told_so():
    with pytest.raises(
        ConfigError, match=r"'metrics': is called with `setup` before.*`__init__\(self, setup, \.\.\.\)`"
    ):
        check_options(WithoutSetup, NAMED, "Engine.callbacks")
    with pytest.raises(
        ConfigError, match=r"'metrics': is called with `output_dir` before.*write `output_dir`"
    ):
        check_options(lambda: None, NAMED, "Engine.loggers")
    check_options(lambda setup, path="x": None, NAMED, "Engine.callbacks")


def test_hooks_that_nothing_calls_are_named(monkeypatch):
    said = []
    monkeypatch.setattr(build, "get_logger", lambda: type("Logger", (), {"warning": said.append}))
    build._checked(WithoutSetup(), "fine")
    build._checked(WithStrangeHook(), "mine")
    (line,) = said
    assert line.startswith(
        "callback mine: nothing calls on_step_begin; the hooks are on_fit_start, on_step_end,"
    )
