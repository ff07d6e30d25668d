"""Causal language modelling with GPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from ppfleetx.core.module.base import BasicModule
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.nn.stage import LayerFactory, Stage


class GPTModule(BasicModule):
    """Predict the next token; the loss counts tokens with ``loss_mask`` 1."""

    def stages(self, factory: LayerFactory) -> list[Stage]:
        return gpt_stages(self.cfg.Model, factory)

    def loss(
        self, model: Any, batch: dict[str, paddle.Tensor], token_loss: Callable[..., Any]
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        logits_sbv = model(
            batch["tokens"],
            position_ids=batch.get("position_ids"),
            document_start=batch.get("document_start"),
        )
        return token_loss(logits_sbv, batch["labels"], batch["loss_mask"], self.cfg.Model.vocab_size)
