"""Causal language modelling with GPT."""

from __future__ import annotations

import paddle

from ppfleetx.models.gpt.stages import model_stages
from ppfleetx.models.module import BasicModule, Tensors
from ppfleetx.nn.loss_output import LossOutput
from ppfleetx.nn.stage import LayerFactory, Stage


class GPTModule(BasicModule):
    """Predict the next token; the loss counts tokens with ``loss_mask`` 1."""

    @property
    def loss_in_pieces(self) -> bool:
        """True; of a task made from this one with a loss of its own, False unless it says so."""
        return type(self).loss is GPTModule.loss

    def stages(self, factory: LayerFactory) -> list[Stage]:
        """The stages of the language model."""
        return model_stages(self.cfg.Model, factory)

    def loss(self, outputs: paddle.Tensor, batch: Tensors, factory: LayerFactory) -> LossOutput:
        return factory.token_loss(outputs, batch["labels"], batch["loss_mask"], self.cfg.Model.vocab_size)
