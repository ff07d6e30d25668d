"""Pipeline parallelism with Paddle's pipeline classes, which transfer activations and order the passes. This
module divides the model into chunks, and runs the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import paddle
from paddle import distributed
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication import SendRecvMeta

from ppfleetx.data.dataloader import MicroBatch
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.loss_output import as_loss_output
from ppfleetx.nn.stage import Stage, build_stage
from ppfleetx.parallel.grad_sync import GradientSync
from ppfleetx.parallel.step_metrics import StepSums
from ppfleetx.parallel.step_runner import StepOptions, StepRunner, to_tensors

if TYPE_CHECKING:
    from ppfleetx.config.parallel_plan import ParallelPlan
    from ppfleetx.models.module import BasicModule
    from ppfleetx.nn.stage import LayerFactory
    from ppfleetx.optims.optimizer import Optimizer


_INPUTS = ("tokens", "position_ids", "document_start")  # inputs of the first stage


def chunk_bounds(plan: ParallelPlan, num_stages: int) -> list[int]:
    """Return the index of each chunk's first stage, followed by ``num_stages``. Chunk c consists of
    consecutive stages of the model, and is on pipeline rank ``c % pp``."""
    # The first chunk also has the embedding, and the last one the final norm and the head.
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
            # Keep fleet from broadcasting the values to replicas, which would double the memory. All replicas
            # initialize the parameter from the same seed.
            parameter.no_sync = True
        if self._ends_chunk:
            # Paddle frees tensors after sending them, including position ids that the backward pass still
            # needs.
            layer.register_forward_post_hook(_copy_passengers)
        return layer


def _copy_passengers(_: Any, __: Any, state: tuple[paddle.Tensor, ...]) -> tuple[paddle.Tensor, ...]:
    return (state[0], *(tensor.clone() for tensor in state[1:]))


class IdentityStage(paddle.nn.Layer):
    """An identity layer for chunks without stages. Paddle requires at least one layer per chunk."""

    def forward(self, state: tuple[paddle.Tensor, ...]) -> tuple[paddle.Tensor, ...]:
        return tuple(tensor.clone() for tensor in state)


class StagePipeline(PipelineLayer):
    """Paddle's container of this rank's pipeline stages. ``plan`` divides the model into chunks, which can
    have different numbers of layers. Parameters are created without memory."""

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
            layers += chunk or [LayerDesc(IdentityStage)]
            self._bounds.append(len(layers))
        super().__init__(
            layers=layers,
            topology=fleet.get_hybrid_communicate_group().topology(),
            loss_fn=loss_fn,
            # Paddle requires this format for virtual stages. The two methods below override the segmentation.
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

    def indexed_layers(self) -> list[tuple[int, paddle.nn.Layer]]:
        """Return (index in the model, layer) of each of the model's layers on this rank."""
        held = [layer for layer in self.sublayers() if hasattr(layer, "index_in_model")]
        return [(layer.index_in_model, layer) for layer in held]


class PipelineRunner(StepRunner):
    """Runs the steps of a model that is divided into pipeline stages.

    Args:
        pipeline: the Paddle pipeline that runs a :class:`StagePipeline`, such as the result of
            ``fleet.distributed_model``.
        loss: the loss function of the :class:`StagePipeline`.
    """

    def __init__(
        self,
        pipeline: Any,
        loss: PipelineLoss,
        optimizer: Optimizer | None,
        ctx: ParallelContext,
        sync: GradientSync,
        options: StepOptions,
    ) -> None:
        indexed_layers = pipeline._layers.indexed_layers()
        super().__init__(
            pipeline._layers, indexed_layers, optimizer, ctx, sync, options, loss.module, loss.factory
        )
        self._pipeline, self._loss = pipeline, loss
        self._metas: dict[Any, SendRecvMeta] = {}
        # Skip Paddle's own reduction of losses, which is unused and costs two messages and a blocking copy.
        pipeline._broadcast_final_loss = lambda *_, **__: None

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], num_valid: float) -> None:
        # Paddle divides each micro batch's loss by the number of micro batches.
        self._loss.begin(self._sums, len(micro_batches), scale=len(micro_batches) / num_valid)
        self._prepare(micro_batches)
        self._pipeline.set_virtual_pipeline_rank(0)
        self._pipeline.forward_backward_pipeline(_feed(micro_batches), None)

    def _forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._loss.begin(self._sums, len(micro_batches), scale=1.0)
        filled = self._with_repeats(micro_batches)
        self._prepare(filled)
        self._pipeline.eval_batch(_feed(filled), compute_loss=True)

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the number of micro batches in Paddle's pipeline. Also set its cache of message shapes, because
        each input shape has its own cache."""
        self._pipeline.accumulate_steps = len(micro_batches)
        # For each mode (training or evaluation) and input shape, neighbors exchange message shapes only in
        # the first pass. All ranks of a pipeline do this in the same pass, because they read the same batch.
        inputs = tuple((name, micro_batches[0][name].shape) for name in _INPUTS if name in micro_batches[0])
        kind = (self._model.training, inputs)  # in training, some of the sent tensors need gradients
        self._pipeline._p2p_helper._send_recv_meta = self._metas.setdefault(kind, SendRecvMeta())

    def _with_repeats(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Repeat the last micro batch until the number of micro batches is a multiple of the pipeline degree,
        as virtual stages require. The repeated micro batches do not count in the loss."""
        filled, plan = list(micro_batches), self._ctx.plan
        while plan.virtual_pp_degree > 1 and len(filled) % plan.pp:
            filled.append(filled[-1])
        return filled


class PipelineLoss:
    """Wraps the loss of a task as a loss function for Paddle's pipeline, which calls it after the last stage.

    Args:
        factory: the layer factory, whose ``token_loss`` and ``token_scores`` handle sliced logits.
    """

    def __init__(self, module: BasicModule, factory: LayerFactory) -> None:
        self.module, self.factory = module, factory
        self._sums: StepSums | None = None
        self._scale, self._left = 1.0, 0

    def begin(self, sums: StepSums, count: int, scale: float) -> None:
        """Prepare for the micro batches of a step. The losses of the first ``count`` micro batches are added
        to ``sums``. Losses returned to Paddle are multiplied by ``scale``."""
        self._sums, self._scale, self._left = sums, scale, count

    def __call__(self, logits: paddle.Tensor, batch: dict[str, paddle.Tensor]) -> paddle.Tensor:
        found = as_loss_output(self.module.loss(logits, batch, self.factory), self.module)
        if self._left > 0:  # the remaining micro batches are repetitions
            self._sums.add(found)
        self._left -= 1
        # In an evaluation the loss is float64, which Paddle cannot send to other stages.
        return found.loss.astype("float32") * self._scale


def _feed(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[tuple[paddle.Tensor, ...], dict]]:
    """Yield (input of the first stage, batch for the loss) for each micro batch, as Paddle's schedules expect
    it."""
    for arrays in micro_batches:
        batch = to_tensors(arrays)
        yield tuple(batch[name] for name in _INPUTS if name in batch), batch


def tied_group(stages: Sequence[Stage], ctx: ParallelContext) -> Any:
    """Create the process group of the pipeline ranks that hold tied weights. All ranks must call this.
    Returns None on ranks without tied weights, or if one rank holds all tied weights."""
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
