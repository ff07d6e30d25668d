"""Pipeline parallelism: Paddle's schedules (1F1B, interleaved) on our list of stages.

Paddle moves activations and decides the order. This module handles names, initial values, the split into
chunks, tied weights, loss and update, so that they do not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import paddle
from paddle import distributed
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication import SendRecvMeta

from ppfleetx.data.loader import MicroBatch
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.loss_output import as_loss_output
from ppfleetx.nn.stage import Stage, build_stage
from ppfleetx.parallel.grad_sync import GradientSync
from ppfleetx.parallel.step import StepOptions, StepRunner, to_tensors
from ppfleetx.parallel.step_sums import StepSums

if TYPE_CHECKING:
    from ppfleetx.config.plan import ParallelPlan
    from ppfleetx.models.module import BasicModule
    from ppfleetx.nn.stage import LayerFactory
    from ppfleetx.optims.optimizer import Optimizer


_INPUTS = ("tokens", "position_ids", "document_start")  # of the first stage only


def chunk_bounds(plan: ParallelPlan, num_stages: int) -> list[int]:
    """The first stage of each chunk, and the end: ``[0, ..., num_stages]``. Chunk c runs on rank ``c % pp``.

    The plan divides the blocks: all stages but the first (embedding) and the last two (final norm, head). The
    embedding joins the first chunk; norm and head join the last.
    """
    ends = [1 + total for total in accumulate(plan.layers_of_chunks(num_stages - 3))]
    return [0, *ends[:-1], num_stages]


class StageDesc(LayerDesc):
    def __init__(self, stage: Stage, index: int, *, ends_chunk: bool) -> None:
        super().__init__(stage.layer_cls)
        self.stage, self.index, self._ends_chunk = stage, index, ends_chunk

    def build_layer(self, **_: Any) -> paddle.nn.Layer:
        layer = build_stage(self.stage, None, empty=True)
        layer.index_in_model = self.index
        for parameter in layer.parameters():
            # Fleet's pipelines would pack all values and send them to the replicas. This would take twice the
            # memory for values that every rank draws itself.
            parameter.no_sync = True
        if self._ends_chunk:
            # Paddle frees tensors that a rank has sent, even ids that its backward pass still needs.
            layer.register_forward_post_hook(_copy_passengers)
        return layer


def _copy_passengers(_: Any, __: Any, state: tuple[paddle.Tensor, ...]) -> tuple[paddle.Tensor, ...]:
    return (state[0], *(tensor.clone() for tensor in state[1:]))


class Passage(paddle.nn.Layer):
    """A layer for chunks without stages: Paddle requires each chunk to compute something."""

    def forward(self, state: tuple[paddle.Tensor, ...]) -> tuple[paddle.Tensor, ...]:
        return tuple(tensor.clone() for tensor in state)


class StagePipeline(PipelineLayer):
    """Paddle's pipeline container, with the uneven chunks of our plan. Parameters have no memory yet."""

    def __init__(
        self,
        stages: Sequence[Stage],
        plan: ParallelPlan,
        loss_fn: Callable[[paddle.Tensor, dict[str, paddle.Tensor]], paddle.Tensor],
    ) -> None:
        self._bounds, layers = [0], []
        for start, end in pairwise(chunk_bounds(plan, len(stages))):
            last = end - 1 if end < len(stages) else None
            chunk = [StageDesc(stages[i], i, ends_chunk=i == last) for i in range(start, end)]
            layers += chunk or [LayerDesc(Passage)]
            self._bounds.append(len(layers))
        super().__init__(
            layers=layers,
            topology=fleet.get_hybrid_communicate_group().topology(),
            loss_fn=loss_fn,
            # Virtual stages require this form; the two methods below decide.
            seg_method="layer:Block",
            num_virtual_pipeline_stages=plan.virtual_pp_degree if plan.virtual_pp_degree > 1 else None,
        )

    def _segment_network(self, seg_method: str) -> None:
        self.segment_parts = self._bounds
        self._start_pos, self._end_pos = self._bounds[self._stage_id], self._bounds[self._stage_id + 1]

    def _segment_network_for_interleave(self, seg_method: str) -> None:
        self.segment_parts = self._bounds
        chunks = range(self._stage_id, self._total_stages_with_virtual_stages, self._num_stages)
        self._start_poss = [self._bounds[chunk] for chunk in chunks]
        self._end_poss = [self._bounds[chunk + 1] for chunk in chunks]

    def held_stages(self) -> list[tuple[int, paddle.nn.Layer]]:
        """(index in the model, layer) of each stage on this rank."""
        held = [layer for layer in self.sublayers() if hasattr(layer, "index_in_model")]
        return [(layer.index_in_model, layer) for layer in held]


class PipelineRunner(StepRunner):
    """Runs this rank's stages in Paddle's schedule: ``pipeline`` is the result of
    ``fleet.distributed_model`` for a :class:`StagePipeline`, ``loss`` the object given to it as its loss
    function."""

    def __init__(
        self,
        pipeline: Any,
        loss: PipelineLoss,
        optimizer: Optimizer | None,
        ctx: ParallelContext,
        sync: GradientSync,
        options: StepOptions,
    ) -> None:
        stages = pipeline._layers.held_stages()
        super().__init__(pipeline._layers, stages, optimizer, ctx, sync, options, loss.module, loss.factory)
        self._pipeline, self._loss = pipeline, loss
        self._metas: dict[Any, SendRecvMeta] = {}
        # Skip Paddle's own sum of losses, which is unused and costs two messages and a blocking copy.
        pipeline._broadcast_final_loss = lambda *_, **__: None

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], num_valid: float) -> None:
        # Paddle divides each micro batch's loss by their number.
        self._loss.begin(self._sums, len(micro_batches), scale=len(micro_batches) / num_valid)
        self._prepare(micro_batches)
        self._pipeline.set_virtual_pipeline_rank(0)
        self._pipeline.forward_backward_pipeline(_feed(micro_batches), None)

    def _forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._loss.begin(self._sums, len(micro_batches), scale=1.0)
        filled = self._filled(micro_batches)
        self._prepare(filled)
        self._pipeline.eval_batch(_feed(filled), compute_loss=True)

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set up the number of micro batches, their shapes and the mode, each of which may differ from the
        last call.

        Neighbors tell each other the shapes of their messages only in the first pass of each kind. Every
        rank of a pipeline reads the same batch, so all ranks know its kind.
        """
        self._pipeline.accumulate_steps = len(micro_batches)
        inputs = tuple((name, micro_batches[0][name].shape) for name in _INPUTS if name in micro_batches[0])
        kind = (self._model.training, inputs)  # in training, some tensors sent have gradients
        self._pipeline._p2p_helper._send_recv_meta = self._metas.setdefault(kind, SendRecvMeta())

    def _filled(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Add micro batches that do not count until the number is a multiple of the stages, as virtual
        stages require."""
        filled, plan = list(micro_batches), self._ctx.plan
        while plan.virtual_pp_degree > 1 and len(filled) % plan.pp:
            filled.append(filled[-1])
        return filled


class PipelineLoss:
    """The loss of a task at the end of the pipeline. ``factory`` knows how the logits are sliced."""

    def __init__(self, module: BasicModule, factory: LayerFactory) -> None:
        self.module, self.factory = module, factory
        self._sums: StepSums | None = None
        self._scale, self._left = 1.0, 0

    def begin(self, sums: StepSums, count: int, scale: float) -> None:
        """Start a series of ``count`` micro batches whose loss sums are multiplied by ``scale`` and added
        to ``sums``."""
        self._sums, self._scale, self._left = sums, scale, count

    def __call__(self, logits: paddle.Tensor, batch: dict[str, paddle.Tensor]) -> paddle.Tensor:
        found = as_loss_output(self.module.loss(logits, batch, self.factory), self.module)
        if self._left > 0:
            self._sums.add(found)
        self._left -= 1
        # Paddle sends the loss to other stages in 16 or 32 bits; in an evaluation it is float64.
        return found.loss.astype("float32") * self._scale


def _feed(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[tuple[paddle.Tensor, ...], dict]]:
    """Yield (input of the first stage, batch for the loss) of each micro batch, in Paddle's format."""
    for arrays in micro_batches:
        batch = to_tensors(arrays)
        yield tuple(batch[name] for name in _INPUTS if name in batch), batch


def tied_group(stages: Sequence[Stage], ctx: ParallelContext) -> Any:
    """Create the group of the pipeline ranks that hold tied weights.

    Every rank creates every group, in the same order, as Paddle requires. The result is None on ranks without
    a tied weight, or if one rank holds all copies.
    """
    keys = {stage.tie.key for stage in stages if stage.tie is not None}
    assert len(keys) <= 1, "one tied layer at most"
    bounds = chunk_bounds(ctx.plan, len(stages))
    holders = sorted({_rank_of(i, bounds, ctx) for i, stage in enumerate(stages) if stage.tie is not None})
    if len(holders) < 2:
        return None
    mine = None
    for column in ctx.plan.groups("pp"):
        members = [column[rank] for rank in holders]
        group = distributed.new_group(members)
        if ctx.rank in members:
            mine = group
    return mine


def _rank_of(index: int, bounds: Sequence[int], ctx: ParallelContext) -> int:
    chunk = max(c for c, start in enumerate(bounds[:-1]) if start <= index)
    return chunk % ctx.plan.pp
