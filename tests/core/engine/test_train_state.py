"""One definition of an epoch for the log, the directories and the length of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ppfleetx.checkpoint.run_ownership import Ownership
from ppfleetx.config.errors import DataError
from ppfleetx.config.loader import load_config
from ppfleetx.core.engine.callbacks.build import CallbackList
from ppfleetx.core.engine.engine import Engine
from ppfleetx.core.engine.run_view import EvalRecord
from ppfleetx.core.engine.saving import Saver
from ppfleetx.core.engine.train_state import TrainingLength, TrainState
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.models.evaluator import EvalOutput
from tests.e2e.conftest import NANO


def length_of(samples_per_epoch: float, *overrides: str) -> TrainingLength:
    return TrainingLength.of(load_config(NANO, overrides), samples_per_epoch)


def test_epoch_mode_counts_whole_global_batches() -> None:
    """41.5 samples hold ten batches of four."""
    found = length_of(
        41.5,
        "Engine.run_mode=epoch",
        "Engine.num_train_epochs=3",
        "Engine.max_steps=1000",
        "Engine.eval_freq=2",
    )
    assert (found.max_steps, found.eval_every, found.save_every) == (30, 20, 10)
    assert [found.position(step) for step in (0, 9, 10, 29)] == [(0, 0), (0, 9), (1, 0), (2, 9)]


def test_epoch_mode_without_save_epoch_saves_by_steps() -> None:
    options = ("Engine.run_mode=epoch", "Engine.save_load.save_epoch=null")
    assert length_of(41.5, *options, "Engine.save_load.save_steps=7").save_every == 7
    assert length_of(41.5, *options, "Engine.save_load.save_steps=null").save_every == 0


def test_step_mode_counts_passes_over_the_text() -> None:
    found = length_of(10.0, "Engine.max_steps=8")
    assert (found.max_steps, found.eval_every, found.save_every) == (8, 4, 4)
    assert [found.position(step)[0] for step in range(6)] == [0, 0, 0, 1, 1, 2]


def test_an_epoch_needs_one_global_batch() -> None:
    with pytest.raises(DataError, match=r"one epoch has 3\.9 samples, less than the global batch of 4"):
        length_of(3.9, "Engine.run_mode=epoch")


class Recorder:
    """A runner that evaluates anything, and a callback that remembers the steps evaluated at."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def eval_step(self, micro_batches: object) -> EvalOutput:
        return EvalOutput(2.0, 1.0, {})

    def on_eval_end(self, engine: Engine, record: EvalRecord) -> None:
        self.steps.append(record.step)

    def __getattr__(self, hook: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.parametrize(("evaluated", "expected"), [(2, [4]), (4, [])])
def test_an_evaluation_cut_short_is_made_up_for_on_resume(
    evaluated: int, expected: list[int], tmp_path: Path
) -> None:
    recorder, cfg, ctx = Recorder(), load_config(NANO, ["Engine.checks=off"]), ParallelContext.single()
    saver = Saver(cfg, ctx, tmp_path, {}, Ownership("a run"))
    engine = Engine(
        cfg,
        ctx,
        recorder,
        saver=saver,
        callbacks=CallbackList([("recorder", recorder)]),
        length=TrainingLength(4, eval_every=4),
    )
    engine.state = TrainState(step=4, evaluated_step=evaluated)
    engine.fit([], eval_sets={None: [[{}]]})
    assert recorder.steps == expected
