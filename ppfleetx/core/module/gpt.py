"""The tasks of a GPT language model: next-token prediction, and the evaluations of ``Offline_Eval``."""

from __future__ import annotations

import paddle

from ppfleetx.models.gpt.stages import model_stages
from ppfleetx.models.module import BasicModule, Tensors
from ppfleetx.nn.loss_output import LossOutput, Sum
from ppfleetx.nn.stage import LayerFactory, Stage


class GPTModule(BasicModule):
    """The task of next-token prediction. The loss is the cross entropy over tokens with ``loss_mask`` 1."""

    @property
    def loss_in_chunks(self) -> bool:
        """Whether the loss can be computed for chunks of tokens, to save memory. False for a subclass that
        overrides ``loss``, unless it also overrides this property."""
        return type(self).loss in (GPTModule.loss, GPTEvalModule.loss)

    def stages(self, factory: LayerFactory) -> list[Stage]:
        return model_stages(self.cfg.Model, factory)

    def loss(self, outputs: paddle.Tensor, batch: Tensors, factory: LayerFactory) -> LossOutput:
        return factory.token_loss(outputs, batch["labels"], batch["loss_mask"], self.cfg.Model.vocab_size)


class GPTEvalModule(GPTModule):
    """The task of ``Offline_Eval``: scoring a text file. ``loss`` returns the negative log-probability of the
    scored tokens. For the cloze test, it returns the number of sequences whose scored tokens are all
    predicted correctly."""

    metrics = ("non_finite",)  # the fraction of tokens whose log-probability is not finite

    def loss(self, outputs: paddle.Tensor, batch: Tensors, factory: LayerFactory) -> LossOutput:
        mask = batch["loss_mask"]
        log_probs, is_greedy = factory.token_scores(outputs, batch["labels"], mask, self.cfg.Model.vocab_size)
        num_broken = log_probs.isfinite().logical_not().astype("float64").sum()
        metrics = {"non_finite": Sum(num_broken, log_probs.size)}
        if not self.cfg.Offline_Eval.cloze_eval:
            return LossOutput(-log_probs.sum(), metrics)
        is_row = (mask != 0).any(axis=1)  # excludes padding rows at the end of the set
        num_right = paddle.logical_and(is_greedy.all(axis=1), is_row).astype("float64").sum()
        return LossOutput(num_right, metrics)
