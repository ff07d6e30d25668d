"""Evaluation and generation are watched as training is: who makes no progress is told."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppfleetx.commands import evaluate, generate, train
from ppfleetx.config.errors import OutOfMemoryError, UserError
from ppfleetx.config.loader import load_config
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.resilience import watchdog
from ppfleetx.resilience.progress import EVALUATING, PROGRESS
from tests.e2e.program import NANO

PROGRAMS: list[tuple[Any, str, Callable[..., Any], str]] = [
    (train, "find_weights", lambda cfg, ctx: train.evaluate(cfg, ctx), "hang_evaluation"),
    (train, "find_weights", lambda cfg, ctx: evaluate.evaluate(cfg, ctx, None), "hang_evaluation"),
    (generate, "load_generator", lambda cfg, ctx: generate.generate(cfg, ctx, ["a"]), "hang_generation"),
]
IDS = ["corpus", "text", "generation"]


@pytest.mark.parametrize(("module", "work", "program", "directory"), PROGRAMS, ids=IDS)
def test_a_program_that_makes_no_progress_is_told(
    module, work, program, directory, tmp_path: Path, monkeypatch, capfd
) -> None:
    """In another's process it is only told, and goes on."""
    overrides = [f"Engine.{key}=0.3" for key in ("hang_timeout", "hang_start_timeout")]
    cfg = load_config(NANO, [*overrides, f"Engine.save_load.output_dir={tmp_path}"])
    said = tmp_path / directory / "summary.txt"
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))

    def hangs(*_: object) -> None:
        deadline = time.monotonic() + 60
        while not said.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        raise UserError("went on")

    monkeypatch.setattr(module, work, hangs)
    with pytest.raises(UserError, match="went on"):
        program(cfg, ParallelContext.single())
    assert "no rank waits for another" in said.read_text()
    assert not list((tmp_path / "local").glob("*")), "copies of the reports are left"
    assert watchdog.current() is None, "the watch ends with the program"
    assert f"reports are in {tmp_path / directory}" in capfd.readouterr().err


@pytest.mark.parametrize(("module", "work", "program"), [one[:3] for one in PROGRAMS], ids=IDS)
def test_a_program_that_runs_out_of_memory_says_what_needs_less(
    module, work, program, tmp_path, monkeypatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("Unable to allocate 9.00 GiB for an array")

    monkeypatch.setattr(module, work, fails)
    cfg = load_config(NANO, [f"Engine.save_load.output_dir={tmp_path}"])
    with pytest.raises(OutOfMemoryError, match=r"Unable to allocate 9.00 GiB.*\n.*Distributed.mp_degree"):
        program(cfg, ParallelContext.single())


def test_each_batch_of_the_test_set_is_progress_of_an_evaluation(monkeypatch) -> None:
    seen: list[tuple[str, float]] = []

    def add(*_: object) -> None:
        seen.append((PROGRESS.place, PROGRESS.since))
        PROGRESS.since = 0.0
        if len(seen) == 2:
            raise UserError("enough")

    monkeypatch.setattr(train, "_loader", lambda *_: [[], []])
    monkeypatch.setattr(train, "evaluator_of", lambda *_, **__: lambda: SimpleNamespace(add=add))
    PROGRESS.begin()
    with pytest.raises(UserError, match="enough"):
        train._predict_test(load_config(NANO), ParallelContext.single(), None)
    assert [(place, since > 0) for place, since in seen] == [(EVALUATING, True)] * 2
