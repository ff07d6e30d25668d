"""What ``ppfleetx check`` says of a run before it starts."""

import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.config.loader import load_config

NANO = "ppfleetx/configs/debug/gpt_nano.yaml"


@pytest.mark.parametrize(
    ("steps", "unit", "ends"),
    [(3, "step", True), (4, "step", False), (3, "sample", True), (40, "sample", False)],
)
def test_a_run_that_ends_within_its_warm_up(steps, unit, ends):
    length = 4 if unit == "step" else 16  # of the warm-up; a step has 4 samples
    more = [f"Optimizer.lr.{key}" for key in (f"unit={unit}", f"warmup_steps={length}", "decay_steps=1000")]
    report = check_report(load_config(NANO, [f"Engine.max_steps={steps}", *more]))
    assert ("the run ends within the warm-up" in report) == ends


def test_what_a_run_starts_from_is_named(tmp_path):
    absent = tmp_path / "none"
    for given, words in (
        (f"init_from={tmp_path}", f"starts from    the weights of {tmp_path}\n"),
        (f"init_from={absent}", f"the weights of {absent}, which is not here\n"),
        (f"ckpt_dir={absent}", f"the run in {absent}, which is not here\n"),
    ):
        assert words in check_report(load_config(NANO, [f"Engine.save_load.{given}"]))
    adapters = ["Model.lora.rank=2", f"Model.lora.base={absent}"]
    report = check_report(load_config(NANO, adapters))
    assert f"starts from    the frozen weights of {absent}, which is not here\n" in report
    assert "starts from" not in check_report(load_config(NANO))
