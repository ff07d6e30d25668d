"""Sequence classification with GPT, for the GLUE tasks."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F

from ppfleetx.config.finetuning import glue_task, num_outputs
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.gpt.stages import gpt_classification_stages
from ppfleetx.models.module import BasicModule, Tensors
from ppfleetx.nn.stage import LayerFactory, Stage


class GPTFinetuneModule(BasicModule):
    """Classify a sequence, or predict a number, from the hidden state of its last real token.

    The loss counts examples with ``loss_mask`` 1: cross entropy, or the squared error of a number.
    """

    def __init__(self, cfg: RunConfig) -> None:
        super().__init__(cfg)
        self.task, self.num_outputs = glue_task(cfg), num_outputs(cfg)

    def stages(self, factory: LayerFactory) -> list[Stage]:
        return gpt_classification_stages(self.cfg.Model, factory, self.num_outputs)

    def forward(self, model: Any, batch: Tensors) -> paddle.Tensor:
        """``[b, outputs]`` float32 at the last of each sequence's ``lengths`` tokens."""
        scores_sbc = model(batch["tokens"]).astype("float32")
        rows = paddle.arange(batch["lengths"].shape[0])
        return paddle.gather_nd(scores_sbc, paddle.stack([batch["lengths"] - 1, rows], axis=1))

    def loss(
        self, outputs: paddle.Tensor, batch: Tensors, factory: LayerFactory
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        labels, weights = batch["labels"], batch["loss_mask"]
        if self.num_outputs == 1:
            each = (outputs.squeeze(-1) - labels).square()
        else:
            each = F.cross_entropy(outputs, labels.unsqueeze(-1), reduction="none").squeeze(-1)
        return (each * weights).sum(), weights.sum()
