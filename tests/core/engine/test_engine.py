"""Evaluations and saves of the training loop, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ppfleetx.checkpoint.run_ownership import Ownership
from ppfleetx.config.loader import load_config
from ppfleetx.core.engine.engine import Engine
from ppfleetx.core.engine.saving import Saver
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.models.evaluator import Measured
from ppfleetx.resilience.heartbeat import EVALUATING, PROGRESS, RESTING, SAVING
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


def test_waiting_for_a_save_is_part_of_it(tmp_path: Any) -> None:
    """Otherwise a long last save would count as a hanging evaluation, after which it is made."""
    saver = Saver(config(), ParallelContext.single(), tmp_path, {}, Ownership("0" * 32))
    places: list[str] = []
    saver._manager = SimpleNamespace(wait=lambda: places.append(PROGRESS.place))
    PROGRESS.beat(EVALUATING)
    with saver.completing():
        pass
    assert places == [SAVING]
