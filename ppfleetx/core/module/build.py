"""Build the task that ``Model.module`` names, with distillation and a loss per corpus if configured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import paddle.nn.functional as F

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import MODULES
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.run_view import SOURCE
from ppfleetx.models.module import BasicModule, Tensors, WrappedTask
from ppfleetx.nn.loss_output import LossOutput, Sum
from ppfleetx.nn.stage import LayerFactory


class SourceLosses(WrappedTask):
    """Wraps a task to also report the loss of each corpus in a blend as a metric. In a batch,
    ``source_ids [b]`` has the index of each sequence's corpus in ``names``. Without ``source_ids``, there
    are no such metrics."""

    def __init__(self, task: BasicModule, names: Sequence[str]) -> None:
        super().__init__(task)
        self._names = [SOURCE + name for name in names]
        self.metrics = (*task.metrics, *self._names)

    def loss(self, outputs: Any, batch: Tensors, factory: LayerFactory) -> LossOutput:
        found = super().loss(outputs, batch, factory)
        if "source_ids" not in batch:
            return found
        if found.rows is None:
            raise ConfigError(
                "the task returns no losses of rows (`LossOutput.rows`), as `factory.token_loss` does",
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


def build_module(cfg: RunConfig, sources: Sequence[str] = ()) -> BasicModule:
    """Build the task that ``Model.module`` names. The loss of each corpus in ``sources`` becomes a metric.
    Raises ConfigError if there is no such task."""
    task = MODULES.make(cfg.Model.module, cfg, gives=BasicModule)
    if cfg.Compress.Distill is not None:
        from ppfleetx.compress.distill import Distillation

        task = Distillation(task, cfg.Compress.Distill)
    return SourceLosses(task, sources) if sources else task
