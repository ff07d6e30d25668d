"""Distillation (Hinton et al., 2015): train a student model on the outputs of a teacher model.

The loss of a token is ``hard_weight`` times the cross entropy plus ``soft_weight`` times T^2 KL(p || q),
where p and q are the distributions of teacher and student at temperature T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import paddle
from paddle import distributed
from paddle.autograd import PyLayer

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.state_dict import load_model
from ppfleetx.checkpoint.weights import with_vocabulary
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.sections.compress import DistillConfig, WeightsConfig, is_of_quantizer
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.validate import section_of
from ppfleetx.models.gpt.stages import model_stages
from ppfleetx.models.module import BasicModule, Tensors, WrappedTask
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.chunked_loss import ChunkedHead, DeferredLogits, OfPiece
from ppfleetx.nn.loss_output import LossOutput
from ppfleetx.nn.quantized import with_quantized_weights
from ppfleetx.nn.stage import LayerFactory, canonical_parameters
from ppfleetx.utils.log import get_logger

_HIDDEN = -1e9  # logit of padding ids


class Distillation(WrappedTask):
    """A language-modeling task whose training loss includes the divergence from a teacher's outputs."""

    def __init__(self, task: BasicModule, cfg: DistillConfig) -> None:
        super().__init__(task)
        self._distill = cfg
        self._teacher: StagedModel | None = None

    def loss(self, outputs: Any, batch: Tensors, factory: LayerFactory) -> LossOutput:
        """Compute the distillation loss in training, and the wrapped task's own loss in evaluation."""
        if not paddle.is_grad_enabled():
            return super().loss(outputs, batch, factory)
        in_pieces = isinstance(outputs, DeferredLogits)
        with paddle.no_grad():
            teacher = self._outputs(self._loaded(factory), batch, in_pieces)
        if in_pieces:
            add = partial(self._add_divergence, factory=factory)
            return super().loss(_ChunksWithTeacher(outputs, teacher, add), batch, factory)
        found = super().loss(outputs, batch, factory)
        mask = factory.local_positions(batch["loss_mask"])
        return replace(found, loss=self._add_divergence(found.loss, outputs, teacher, mask, factory))

    def _outputs(self, teacher: StagedModel, batch: Tensors, in_pieces: bool) -> Any:
        heads = [layer for layer in teacher.sublayers() if isinstance(layer, ChunkedHead)]
        with heads[0].loss_follows() if in_pieces else nullcontext():
            return self.task.forward(teacher, batch)

    def _add_divergence(
        self,
        cross_entropy: paddle.Tensor,
        student: paddle.Tensor,
        teacher: paddle.Tensor,
        mask: paddle.Tensor,
        factory: LayerFactory,
    ) -> paddle.Tensor:
        """Return the training loss: the weighted sum of the cross entropy and the divergence.

        Args:
            cross_entropy: the cross entropy, summed over the positions that count.
            student, teacher: logits ``[s, b, V]``.
            mask: ``[b, s]``, 1 at positions that count.
        """
        cfg = self._distill
        each = divergence(student, teacher, self.cfg.Model.vocab_size, cfg.temperature, factory.group)
        soft = (each * mask.transpose([1, 0]).astype(each.dtype)).sum().astype(cross_entropy.dtype)
        return cfg.hard_weight * cross_entropy + cfg.soft_weight * cfg.temperature**2 * soft

    def _loaded(self, factory: LayerFactory) -> StagedModel:
        if self._teacher is None:
            self._teacher = load_teacher(self._distill.teacher, self.cfg.Model, factory)
        return self._teacher


class _ChunksWithTeacher(DeferredLogits):
    """Student logits that are computed in chunks to save memory. The divergence from the teacher is added to
    the loss of each chunk."""

    def __init__(
        self, student: DeferredLogits, teacher: DeferredLogits, add: Callable[..., paddle.Tensor]
    ) -> None:
        super().__init__(student.head, student.hidden)
        self._teacher, self._add = teacher, add

    def loss(self, labels: paddle.Tensor, mask: paddle.Tensor, function: OfPiece) -> paddle.Tensor:
        teachers = self._teacher.logits()

        def of_both(logits: paddle.Tensor, labels: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
            return self._add(function(logits, labels, mask), logits, next(teachers), mask)

        return super().loss(labels, mask, of_both)


def _check_experts(teacher: ModelConfig, student: ModelConfig, factory: LayerFactory) -> None:
    """Raise ConfigError if the teacher has experts that the student's parallel plan cannot place. The plan is
    used for both models."""
    if teacher.moe is None:
        return
    key, ep = "Compress.Distill.teacher", factory.mesh.size_of("ep")
    if student.moe is None and factory.group is not None:
        raise ConfigError(
            "is a mixture of experts, and the student is not: that needs Distributed.mp_degree = 1", key=key
        )
    if teacher.moe.num_experts % ep:
        raise ConfigError(
            f"has {teacher.moe.num_experts} experts, which do not divide by Distributed.ep_degree = {ep}",
            key=key,
        )


def load_teacher(place: str, student: ModelConfig, factory: LayerFactory) -> StagedModel:
    """Build the teacher from the checkpoint at ``place``, in evaluation mode and without gradients. Only
    the weights that this rank needs are loaded.

    Args:
        place: the path of the checkpoint.
        student: the ``Model`` section of the student.
        factory: makes layers for the student's parallel plan, which is also used for the teacher.

    Raises CheckpointError if the vocabulary sizes of teacher and student differ; ConfigError if the teacher
    has experts that the student's parallel plan cannot place.
    """
    checkpoint = open_resolved(resolve_checkpoint(place, verify=False))
    model = _model_of(checkpoint)
    if model.vocab_size != student.vocab_size:
        raise CheckpointError(
            f"Compress.Distill.teacher: {checkpoint.path} has a vocabulary of {model.vocab_size}, the "
            f"student (Model.vocab_size) of {student.vocab_size}: their outputs cannot be compared"
        )
    _check_experts(model, student, factory)
    rows = "vocab_size_divisible_unit"  # so that both models slice their logits in the same way
    alike = {rows: getattr(student, rows), "loss_chunks": student.loss_chunks}
    model = model.model_copy(update={**alike, "lora": None})
    stages = with_quantized_weights(model_stages(model, factory), _weights_format(checkpoint), factory)
    teacher = StagedModel(stages, seed=None)
    teacher.eval()
    parameters = canonical_parameters(teacher)
    scales = [name for name in checkpoint.names() if is_of_quantizer(name)]
    weights = with_vocabulary(checkpoint, model.vocab_size)
    load_model(parameters.items(), weights, vocab_size=model.vocab_size, allow_extra=scales)
    for parameter in parameters.values():
        parameter.stop_gradient = True
    get_logger().info(f"the teacher is {checkpoint.path}, of {model.num_layers} layers")
    return teacher


def _model_of(checkpoint: Checkpoint) -> ModelConfig:
    saved = checkpoint.manifest.config
    section = saved.get("Model") if isinstance(saved, Mapping) else None
    if not section:
        raise CheckpointError(
            f"Compress.Distill.teacher: checkpoint {checkpoint.path} does not say what network it is"
        )
    return ModelConfig(**{key: value for key, value in section.items() if key in ModelConfig.model_fields})


def _weights_format(checkpoint: Checkpoint) -> WeightsConfig | None:
    """Return the ``Compress.Weights`` section of a checkpoint; None if its weights are not quantized."""
    compress = checkpoint.manifest.config.get("Compress") or {}
    weights = compress.get("Weights")
    return None if weights is None else section_of(WeightsConfig, weights)


def divergence(
    student: paddle.Tensor, teacher: paddle.Tensor, true_vocab: int, temperature: float, group: Any
) -> paddle.Tensor:
    """Return the divergence KL(p || q) ``[s, b]`` of the student's distribution q from the teacher's p.

    Args:
        student, teacher: logits ``[s, b, V]``; only the student gets a gradient.
        true_vocab: vocabulary size without padding.
        temperature: the logits of both models are divided by it.
        group: the tensor-parallel group over which V is split; None: V is not split.
    """
    return _Divergence.apply(student, teacher, true_vocab, temperature, group)


class _Divergence(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        student: paddle.Tensor,
        teacher: paddle.Tensor,
        true_vocab: int,
        temperature: float,
        group: Any,
    ) -> paddle.Tensor:
        log_q = _log_softmax(student, true_vocab, temperature, group)
        log_p = _log_softmax(teacher, true_vocab, temperature, group)
        p = log_p.exp()
        ctx.gradient = ((log_q.exp() - p) / temperature).astype(student.dtype)
        each = (p * (log_p - log_q)).sum(axis=-1)
        return each if group is None else _over(group, each, distributed.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor, None]:
        return upstream.astype(ctx.gradient.dtype).unsqueeze(-1) * ctx.gradient, None


def _log_softmax(logits: paddle.Tensor, true_vocab: int, temperature: float, group: Any) -> paddle.Tensor:
    width = logits.shape[-1]
    here = true_vocab if group is None else min(max(true_vocab - group.rank * width, 0), width)
    wide = logits if logits.dtype == paddle.float64 else logits.astype("float32")
    wide = wide.detach() / temperature
    if here < width:
        wide[..., here:] = _HIDDEN
    peak = wide.max(axis=-1, keepdim=True)
    if group is not None:
        _over(group, peak, distributed.ReduceOp.MAX)
    wide = wide - peak
    total = wide.exp().sum(axis=-1, keepdim=True)
    if group is not None:
        _over(group, total, distributed.ReduceOp.SUM)
    return wide - total.log()


def _over(group: Any, tensor: paddle.Tensor, operation: Any) -> paddle.Tensor:
    distributed.all_reduce(tensor, op=operation, group=group)
    return tensor
