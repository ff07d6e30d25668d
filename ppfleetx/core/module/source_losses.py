"""The loss of a blend, corpus by corpus: metrics beside any task whose loss is a sum over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import paddle.nn.functional as F

from ppfleetx.config.errors import ConfigError
from ppfleetx.core.engine.run import SOURCE
from ppfleetx.models.module import BasicModule, Tensors, WrappedTask
from ppfleetx.nn.loss_output import LossOutput, Sum
from ppfleetx.nn.stage import LayerFactory


class SourceLosses(WrappedTask):
    """A task with a metric ``source/NAME`` for each corpus of its training data.

    Args:
        task: the task.
        names: of the corpora; ``source_ids [b]`` of a batch are places in it. Batches without them, those of
            evaluations, have no such metrics.
    """

    def __init__(self, task: BasicModule, names: Sequence[str]) -> None:
        super().__init__(task)
        self._names = [SOURCE + name for name in names]
        self.metrics = (*task.metrics, *self._names)

    def loss(self, outputs: Any, batch: Tensors, factory: LayerFactory) -> LossOutput:
        """The task's.

        Raises:
            ConfigError: the task does not give the losses of rows.
        """
        found = super().loss(outputs, batch, factory)
        if "source_ids" not in batch:
            return found
        if found.rows is None:
            raise ConfigError(
                "the task does not give the losses of rows (`LossOutput.rows`), as `factory.token_loss` does",
                key="Engine.log_source_loss",
                value=True,
            )
        rows = found.rows()
        is_of_bn = F.one_hot(batch["source_ids"], len(self._names)).astype("float64")
        value, count = (
            (each.astype("float64").unsqueeze(-1) * is_of_bn).sum(axis=0).unbind()
            for each in (rows.value, rows.count)
        )
        own = {
            name: Sum(*pair, same_on=rows.same_on)
            for name, *pair in zip(self._names, value, count, strict=True)
        }
        return replace(found, metrics={**found.metrics, **own})
