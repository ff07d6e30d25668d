"""A classifier's answers as the TSV file of a GLUE submission."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import RunConfig, data_sets
from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.run import EvalRecord, Run
from ppfleetx.data.tasks.glue import TASKS, GlueTask
from ppfleetx.utils.files import atomic_write
from ppfleetx.utils.log import get_logger


class Predictions(Callback):
    """After each evaluation, writes what was answered, in place of the last evaluation's file.

    Args:
        directory: of the files.
        task: says what they are called.
        parts: the evaluated part of the task by the name of its set; sets of one part have one file.
    """

    def __init__(self, directory: Path, task: GlueTask, parts: Mapping[str | None, str]) -> None:
        self._directory, self._task, self._parts = directory, task, parts

    @classmethod
    def of(cls, setup: CallbackSetup) -> Predictions | None:
        """For a classifier of a GLUE task."""
        evaluated = setup.cfg.Data.Eval
        if evaluated is None or evaluated.dataset.name not in TASKS:
            return None
        parts = {name: one.Data.Eval.dataset.split for name, one in data_sets(setup.cfg).items()}
        return cls(predictions_directory(setup.cfg), TASKS[evaluated.dataset.name], parts)

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        if record.outputs is not None:
            file = self._task.file_name(self._parts[record.name])
            write_predictions(self._directory / file, self._task, record.outputs)


def predictions_directory(cfg: RunConfig) -> Path:
    """Where a classifier's answers are."""
    return Path(cfg.Engine.save_load.output_dir) / "predictions"


def write_predictions(path: Path, task: GlueTask, outputs: np.ndarray) -> None:
    """Write ``index <tab> prediction`` of every example.

    Args:
        path: the file; its directory is made.
        task: says what the outputs mean.
        outputs: ``[examples, outputs]``.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "w") as file:
            file.write("index\tprediction\n")
            file.writelines(f"{i}\t{task.answer(row)}\n" for i, row in enumerate(outputs.tolist()))
    except OSError as error:
        raise ConfigError(
            f"predictions cannot be written: {error.strerror}",
            key="Engine.save_load.output_dir",
            value=str(path),
        ) from error
    get_logger().info(f"predictions of {counted(len(outputs), 'example')}: {path}")
