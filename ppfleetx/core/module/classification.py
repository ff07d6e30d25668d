"""Finetune GPT on the GLUE tasks, evaluate it, and write prediction files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.message_text import counted
from ppfleetx.config.rules import glue_task, num_outputs
from ppfleetx.config.sections.root import RunConfig, data_sets
from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.run_view import EvalRecord, Run
from ppfleetx.data.dataloader import MicroBatch
from ppfleetx.data.tasks.glue import TASKS, GlueTask, glue_metrics
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather
from ppfleetx.models.evaluator import Measured
from ppfleetx.models.gpt.stages import gpt_classification_stages
from ppfleetx.models.module import BasicModule, Tensors
from ppfleetx.nn.loss_output import LossOutput, Sum
from ppfleetx.nn.stage import LayerFactory, Stage
from ppfleetx.parallel.step_runner import StepRunner
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import atomic_write


class GPTFinetuneModule(BasicModule):
    """Classifies a sequence, or predicts a number for it, from the hidden state of its last token. The loss
    is the cross entropy for classes, and the squared error for numbers. Only examples with ``loss_mask`` 1
    count."""

    def __init__(self, cfg: RunConfig) -> None:
        super().__init__(cfg)
        self.task, self.num_outputs = glue_task(cfg), num_outputs(cfg)

    def stages(self, factory: LayerFactory) -> list[Stage]:
        return gpt_classification_stages(self.cfg.Model, factory, self.num_outputs)

    def forward(self, model: Any, batch: Tensors) -> paddle.Tensor:
        """Return the outputs of the classification head at the last token of each sequence,
        ``[b, outputs]`` in float32. ``lengths [b]`` in the batch has the length of each sequence without
        padding."""
        scores_sbc = model(batch["tokens"]).astype("float32")
        rows = paddle.arange(batch["lengths"].shape[0])
        return paddle.gather_nd(scores_sbc, paddle.stack([batch["lengths"] - 1, rows], axis=1))

    def loss(self, outputs: paddle.Tensor, batch: Tensors, factory: LayerFactory) -> LossOutput:
        labels, weights = batch["labels"], batch["loss_mask"]
        if self.num_outputs == 1:
            each = (outputs.squeeze(-1) - labels).square()
        else:
            each = F.cross_entropy(outputs, labels.unsqueeze(-1), reduction="none").squeeze(-1)
        weighted = each * weights
        rows = weighted.detach()
        return LossOutput(weighted.sum(), rows=lambda: Sum(rows, weights))

    def evaluator(self, ctx: ParallelContext, *, has_labels: bool = True) -> Classification:
        return Classification(self, ctx, has_labels=has_labels)


class Classification:
    """Evaluates a classifier on one evaluation set: gathers outputs from the data-parallel ranks and, if the
    examples have labels, computes the loss and the metrics of the GLUE task."""

    def __init__(self, module: GPTFinetuneModule, ctx: ParallelContext, *, has_labels: bool = True) -> None:
        self._module, self._ctx, self._has_labels = module, ctx, has_labels
        self._rows: list[list[float]] = []

    def add(self, runner: StepRunner, micro_batches: Sequence[MicroBatch]) -> None:
        found = runner.compute(self._module.forward, micro_batches)
        if self._ctx.rank_on("mp"):
            return  # the first tensor-parallel rank has the same outputs
        for batch, outputs in zip(micro_batches, found, strict=True):
            rows = np.column_stack([batch["sample_ids"], batch["labels"], outputs.astype(np.float64)])
            self._rows += rows[batch["loss_mask"] > 0].tolist()

    def result(self) -> Measured | None:
        rows = np.array([row for rank in gather(self._ctx, self._rows) for row in rank])
        if rows.size == 0:
            return None
        rows = rows[rows[:, 0].argsort()]
        assert (rows[:, 0] == np.arange(len(rows))).all(), "each example counts once"
        labels, outputs = rows[:, 1], rows[:, 2:]
        if not self._has_labels:
            return Measured(math.nan, len(rows), outputs=outputs)
        metrics = glue_metrics(self._module.task, outputs, labels)
        return Measured(mean_loss(outputs, labels), len(rows), metrics=metrics, outputs=outputs)


def mean_loss(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean cross entropy of ``outputs [examples, classes]`` or, if there is only one column, the
    mean squared error."""
    if outputs.shape[1] == 1:
        return float(np.square(outputs[:, 0] - labels).mean())
    shifted = outputs - outputs.max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(labels)), labels.astype(np.int64)]
    return float((np.log(np.exp(shifted).sum(axis=1)) - chosen).mean())


class Predictions(Callback):
    """Callback that writes a classifier's predictions to a file after each evaluation. ``parts`` maps the
    name of each evaluation set to its GLUE split, which determines the file name."""

    def __init__(self, directory: Path, task: GlueTask, parts: Mapping[str | None, str]) -> None:
        self._directory, self._task, self._parts = directory, task, parts

    @classmethod
    def of(cls, setup: CallbackSetup) -> Predictions | None:
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
    return Path(cfg.Engine.save_load.output_dir) / "predictions"


def write_predictions(path: Path, task: GlueTask, outputs: np.ndarray) -> None:
    """Write a file of predictions with a header and one line ``index <tab> prediction`` per example.
    ``outputs [examples, outputs]`` are the outputs of the classifier. Raises ConfigError if the file cannot
    be written."""
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
