"""What --check and a run's start and end say of memory and time."""

import logging
from types import SimpleNamespace

import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.core.engine.callbacks.device_usage import Forecast
from ppfleetx.planner.prediction import run_prediction

SHIPPED = "ppfleetx/configs/nlp/gpt/pretrain_gpt_{}.yaml"
NANO = "ppfleetx/configs/debug/gpt_nano.yaml"


# What docs/planner.md promises of the recipes on V100s of 32 GB, and with half the hidden size on those of
# 16.
@pytest.mark.parametrize(
    ("name", "half", "fits"),
    [
        ("345M_single_card", 512, False),
        ("345M_mp8_qat", 512, True),
        ("1.3B_single_card", 1024, True),
        ("1.3B_dp8", 1024, True),
        ("6.7B_sharding16", 2048, True),
        ("175B_mp8_pp16", 6144, False),
    ],
)
def test_recipes_fit_what_is_promised(name, half, fits):
    cfg = load_config(SHIPPED.format(name))
    assert cfg.Global.card == "V100-32GB"
    report = check_report(cfg)
    assert ("it fits V100-32GB" in report) is fits
    assert ("it does NOT fit V100-32GB" in report) is not fits
    small = load_config(SHIPPED.format(name), [f"Model.hidden_size={half}", "Global.card=V100-16GB"])
    assert run_prediction(small, "gpu").fits is (name != "345M_single_card")


def test_no_verdict_without_a_card():
    report = check_report(load_config(NANO), "cpu")
    assert "memory " in report
    assert "fit" not in report.split("memory", 1)[1].splitlines()[0]
    assert "it fits" not in report


def test_no_such_card():
    with pytest.raises(
        ConfigError, match=r"^Global\.card = 'V100-32' \(.*override 1.*did you mean V100-32GB"
    ):
        check_report(load_config(NANO, ["Global.card=V100-32"]))


def test_what_does_not_train_has_no_memory_line():
    cfg = load_config("ppfleetx/configs/nlp/gpt/generation_gpt_345M_single_card.yaml")
    assert "a device" not in check_report(cfg)


def test_a_card_that_does_not_compute_in_the_type_has_memory_and_no_time():
    """A run must not end with an error because nobody knows how fast it should have been."""
    low = ["Engine.mix_precision.enable=True", "Engine.mix_precision.dtype=bfloat16"]
    cfg = load_config(NANO, [*low, "Global.card=V100-32GB"])
    assert run_prediction(cfg, "gpu") is None
    assert "a device" in check_report(cfg, "gpu")
    assert run_prediction(load_config(NANO, [*low, "Global.card=A100-80GB"]), "gpu") is not None


def test_the_end_compares_prediction_and_measurement(caplog):
    cfg = load_config(NANO)
    run = SimpleNamespace(ctx=SimpleNamespace(device="cpu", rank_on=lambda _: 0))
    forecast = Forecast(run_prediction(cfg, "cpu"), named=False)
    forecast.on_fit_start(run)
    with caplog.at_level(logging.INFO):
        forecast.on_fit_end(run)
        assert not caplog.text  # no step was measured
        for seconds in (9.0, 9.0, 0.25, 0.5, 0.125):
            forecast.on_step_end(run, SimpleNamespace(batch_cost=seconds))
        forecast.on_fit_end(run)
    assert "predicted and measured: memory of tensors" in caplog.text
    assert "and 0.25 s (constants of CPU, which Global.card can change)" in caplog.text
