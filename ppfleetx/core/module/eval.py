"""Scores of tokens by a trained GPT: what ``Offline_Eval`` sums up."""

from __future__ import annotations

import paddle

from ppfleetx.core.module.gpt import GPTModule
from ppfleetx.models.module import Tensors
from ppfleetx.nn.stage import LayerFactory


class GPTEvalModule(GPTModule):
    """GPT's network; its "loss" has no gradient and is what an evaluation counts.

    Perplexity: minus the sum of the log probabilities of tokens with ``loss_mask`` 1. Cloze: the number of
    rows in which every such token was the likeliest. NaN where logits are not finite.
    """

    @property
    def loss_in_pieces(self) -> bool:
        return type(self).loss is GPTEvalModule.loss

    def loss(
        self, outputs: paddle.Tensor, batch: Tensors, factory: LayerFactory
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        mask = batch["loss_mask"]
        log_probs, is_greedy = factory.token_scores(outputs, batch["labels"], mask, self.cfg.Model.vocab_size)
        if not self.cfg.Offline_Eval.cloze_eval:
            return -log_probs.sum(), mask.sum()
        is_row = (mask != 0).any(axis=1)  # and not filled up at the end of the set
        num_right = paddle.logical_and(is_greedy.all(axis=1), is_row).astype("float64").sum()
        return num_right + 0.0 * log_probs.sum(), is_row.astype("float64").sum()
