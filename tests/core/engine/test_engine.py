"""Evaluations, saves and records of the training loop, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppfleetx.checkpoint.run_ownership import Ownership
from ppfleetx.config.loader import load_config
from ppfleetx.core.engine.callbacks.metrics import LogWriters, keep_until
from ppfleetx.core.engine.engine import Engine
from ppfleetx.core.engine.saving import Saver
from ppfleetx.core.engine.train_state import TrainState
from ppfleetx.core.loggers.files import CsvFile
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.models.evaluator import Measured
from ppfleetx.resilience.progress import EVALUATING, PROGRESS, RESTING, SAVING
from ppfleetx.resilience.stop_request import StopRequest


def config(*overrides: str) -> Any:
    return load_config("debug/gpt_nano", ["Data.Train.dataset.input_dir=x", *overrides], world_size=1)


class Saves:
    """Stands for the saver: keeps the states that would be saved."""

    def __init__(self) -> None:
        self.states: list[str] = []

    def save(self, run: Engine) -> None:
        self.states.append(json.dumps(run.state.to_json(), allow_nan=False))  # as a manifest is written

    def mark_best(self, run: Engine) -> bool:
        return True

    @contextmanager
    def completing(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize(
    ("losses", "best_step"), [([3.0, 2.0, 2.5], 2), ([float("inf"), 2.0], 2), ([2.0, float("nan")], 1)]
)
def test_the_best_evaluation_is_finite(losses: list[float], best_step: int) -> None:
    saves, found = Saves(), iter(losses)

    def evaluator() -> Any:
        result = Measured(next(found), 1.0)
        return SimpleNamespace(add=lambda *_: None, result=lambda: result)

    runner = SimpleNamespace(count=len)
    cfg = config("Engine.save_load.keep_best=loss", "Engine.checks=off")
    engine = Engine(cfg, ParallelContext.single(), runner, saver=saves, new_evaluator=evaluator)
    PROGRESS.beat(RESTING)
    for step in range(1, len(losses) + 1):
        engine.state.step = step
        engine._evaluate_and_keep({None: [[]]}, StopRequest())
    assert engine.state.best_step == best_step
    assert PROGRESS.place == RESTING


def test_an_error_of_an_evaluation_was_raised_while_evaluating() -> None:
    """Reports of the error, which are made later, name the place."""

    def fail(*_: Any) -> None:
        raise MemoryError

    evaluator, runner = SimpleNamespace(add=fail), SimpleNamespace(count=len)
    alone = ParallelContext.single()
    engine = Engine(config("Engine.checks=off"), alone, runner, new_evaluator=lambda: evaluator)
    PROGRESS.beat(RESTING)
    with pytest.raises(MemoryError):
        engine.evaluate({None: [[]]})
    assert PROGRESS.place == EVALUATING


def test_waiting_for_a_save_is_part_of_it(tmp_path: Path) -> None:
    """Otherwise a long last save would count as a hanging evaluation, after which it is made."""
    saver = Saver(config(), ParallelContext.single(), tmp_path, {}, Ownership("0" * 32))
    places: list[str] = []
    saver._manager = SimpleNamespace(wait=lambda: places.append(PROGRESS.place))
    PROGRESS.beat(EVALUATING)
    with saver.completing():
        pass
    assert places == [SAVING]


def test_a_resumed_run_drops_the_records_that_its_checkpoint_does_not_know(tmp_path: Path) -> None:
    records = [
        {"kind": "train", "step": 4, "consumed_samples": 32},
        {"kind": "eval", "step": 2},
        {"kind": "eval", "step": 4},  # is made again, because a signal had interrupted the one before
        {"kind": "spike", "step": 4, "at_step": 6, "consumed_samples": 48},  # went back to step 4
        {"kind": "spike", "step": 3, "at_step": 3, "samples": [40, 48]},
        {"kind": "train", "step": 5, "consumed_samples": 40},
        # Older versions did not write the samples consumed.
        {"kind": "spike", "step": 4, "at_step": 6, "to_step": 4, "samples": [40, 48]},
        {"kind": "spike", "step": 2, "at_step": 3, "to_step": 2, "samples": [16, 24]},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records) + '{"kind": "tr')
    keep_until(path, 4, max_consumed_samples=32, max_evaluated_step=2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [records[i] for i in (0, 1, 4, 7)]


def test_an_evaluation_that_is_made_again_is_one_row_of_the_table(tmp_path: Path) -> None:
    for state in (TrainState(), TrainState(step=4, evaluated_step=2)):
        writers = LogWriters({"csv": CsvFile(tmp_path)}, logging_freq=1)
        writers.on_fit_start(SimpleNamespace(cfg=config(), state=state))
        for step in (2, 4) if state.step == 0 else (4,):
            if state.step < step:
                writers.keep({"kind": "train", "step": step, "loss": 3.0})
            writers.keep({"kind": "eval", "set": "wiki", "step": step, "loss": 2.0})
    rows = (tmp_path / "metrics.csv").read_text().split()
    assert rows == ["step,train/loss,eval/wiki/loss", "2,3.0,", "2,,2.0", "4,3.0,", "4,,2.0"]
