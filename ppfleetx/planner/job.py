"""The input of the planner: a training job, that is a model, its batch sizes and one parallel plan."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import itemgetter

from ppfleetx.config.parallel_plan import ParallelPlan, Workload
from ppfleetx.config.rules import model_workload, sequence_length
from ppfleetx.config.sections.compress import CompressConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.gpt.spec import BlockSpec, ModelSpec, model_spec, parameter_specs
from ppfleetx.nn.cost import Kernels, Recompute, Work
from ppfleetx.nn.cpu_ops.compiled import obstacle
from ppfleetx.planner.cards import Card

Layer = tuple[BlockSpec, Recompute]
"""A transformer block and its recompute granularity."""

EXPERT_IMBALANCE = 1.5
"""Safety margin of the memory prediction under expert parallelism. The planner assumes that, in the worst
layer and micro batch, the experts of one rank get this many times the mean number of tokens.
"""


@dataclass(frozen=True)
class Precision:
    """The data types of a training step.

    Attributes:
        compute: the type of activations and matmuls, e.g. ``bfloat16``.
        lowers_parameters: whether parameters also have the type ``compute``. The optimizer then keeps float32
            master copies.
        main_grads: whether gradients of 16-bit parameters are kept and reduced in float32.
        rounds_matmuls: whether only the operands of matmuls are rounded to 16 bits, as on a CPU. All other
            numbers are then float32.
    """

    compute: str = "float32"
    lowers_parameters: bool = False
    main_grads: bool = True
    rounds_matmuls: bool = False

    @property
    def activation_bytes(self) -> int:
        """The bytes of one element of an activation."""
        return 4 if self.compute == "float32" else 2

    @property
    def parameter_bytes(self) -> int:
        """The bytes of one element of a parameter, as used in forward and backward passes."""
        return 2 if self.lowers_parameters else 4

    @property
    def master_bytes(self) -> int:
        """The bytes of one element of a float32 master copy; 0 without master copies."""
        return 4 if self.lowers_parameters else 0

    @property
    def gradient_bytes(self) -> int:
        """The bytes of one element of a gradient while it is kept and reduced."""
        return 2 if self.lowers_parameters and not self.main_grads else 4


@dataclass(frozen=True)
class Overlap:
    """The communication that overlaps with computation.

    Attributes:
        bucket_bytes: the size of gradient messages during the backward pass; None: gradient reduction does
            not overlap.
        values: whether ranks compute while the owners of sharded parameters send them.
        messages: whether pipeline stages compute while their messages are sent.
    """

    bucket_bytes: float | None = None
    values: bool = False
    messages: bool = False


@dataclass(frozen=True)
class Job:
    """The training job whose memory and time the planner predicts: a model, its batch sizes and one parallel
    plan.

    Attributes:
        model: the model. Its settings for sequence parallelism and recompute are ignored, and replaced by
            ``plan`` and ``recomputed``.
        micro_batch: micro batch size in sequences.
        accumulate: micro batches of a data-parallel rank in a step.
        recomputed: the recompute granularity of each layer.
        moments: mean number of optimizer states per trainable parameter, such as 2 for AdamW.
        needs_whole_matrices: whether the optimizer updates whole matrices, as Muon does. Some plans are then
            not legal.
        flash: whether attention uses a flash attention kernel.
        async_save: whether checkpoints are written in the background, from a copy in host memory.
        kernels: the implementation to predict (:data:`ppfleetx.nn.cost.Kernels`).
        flat_states: whether sharding divides optimizer states into equal parts, as DeepSpeed's ZeRO does,
            instead of assigning whole parameters to ranks.
        fragments: share of the allocated memory lost to fragmentation; None: the default for ``kernels``.
    """

    model: ModelConfig
    plan: ParallelPlan
    micro_batch: int
    accumulate: int
    seq_len: int
    precision: Precision
    recomputed: tuple[Recompute, ...]
    moments: float = 2
    needs_whole_matrices: bool = False
    flash: bool = False
    async_save: bool = False
    kernels: Kernels = "gpu"
    flat_states: bool = False
    fragments: float | None = None
    overlap: Overlap = Overlap()
    compress: CompressConfig | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        plan = self.plan
        degrees = (plan.dp, plan.mp, plan.pp, plan.sharding, plan.sep, plan.ep, plan.sequence_parallel)
        return hash((id(self.model), degrees, self.micro_batch, self.accumulate, self.seq_len))

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulate * self.plan.data_size

    @property
    def tokens(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def hidden_bytes(self) -> float:
        """The bytes of a micro batch's hidden states on a rank. Context parallelism (``sep``) divides them;
        sequence parallelism is not taken into account."""
        tokens = self.micro_batch * self.seq_len / self.plan.sep
        return tokens * self.model.hidden_size * self.precision.activation_bytes

    @property
    def overlaps_messages(self) -> bool:
        """Whether pipeline stages compute while their messages are sent; never with virtual stages."""
        return self.overlap.messages and self.plan.pp > 1 and self.plan.virtual_pp_degree == 1

    @property
    def message_parts(self) -> int:
        """The number of parts in which an activation is sent to the next pipeline stage, each by a different
        tensor-parallel rank."""
        plan = self.plan
        # If tensor-parallel ranks hold the same activation, each rank sends one part of it.
        sends_all = plan.pp_schedule == "zb_h1" or self.overlaps_messages
        return 1 if plan.sequence_parallel or sends_all else plan.mp

    @property
    def message_bytes(self) -> float:
        """The bytes that one tensor-parallel rank sends to the next pipeline stage per micro batch."""
        return self.hidden_bytes / (self.plan.mp if self.plan.sequence_parallel else self.message_parts)

    @property
    def forwards_first(self) -> bool:
        """Whether a pipeline with virtual stages runs all forward passes before the first backward pass."""
        plan = self.plan
        if plan.virtual_pp_degree == 1:
            return False
        # Megatron-LM does so if a step has exactly pp micro batches, Paddle if it has fewer than 2 pp.
        return self.accumulate == plan.pp if self.kernels == "fused" else self.accumulate < 2 * plan.pp

    @property
    def workload(self) -> Workload:
        """The properties of the model and the batch that decide whether a parallel plan is legal."""
        return model_workload(
            self.model, self.seq_len, self.accumulate, needs_whole_matrices=self.needs_whole_matrices
        )

    def layers_of_stage(self, stage: int) -> list[list[int]]:
        """Return the layer indices on pipeline stage ``stage``, one list per virtual stage."""
        chunks = self.plan.layers_of_chunks(self.model.num_layers)
        ends = list(itertools.accumulate(chunks))
        mine = range(stage, self.plan.num_chunks, self.plan.pp)
        return [list(range(ends[c] - chunks[c], ends[c])) for c in mine]

    @property
    def model_key(self) -> ModelKey:
        """A cache key for values that depend only on the model, not on the plan or the batch."""
        return ModelKey(self.model, self.compress)

    @property
    def spec(self) -> ModelSpec:
        return _spec_of(self.model_key)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(zip(self.spec.blocks, self.recomputed, strict=True))

    @cached_property
    def work(self) -> Work:
        plan, precision = self.plan, self.precision
        return Work(
            self.micro_batch,
            self.seq_len,
            plan.mp,
            plan.sep,
            plan.sequence_parallel,
            precision.activation_bytes,
            precision.parameter_bytes,
            precision.gradient_bytes,
            self.kernels,
            self.flash,
            plan.ep,
            plan.emp,
            EXPERT_IMBALANCE if plan.ep > 1 else 1.0,
            precision.rounds_matmuls,
        )

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        return tuple(sorted(dict.fromkeys(self.layers), key=itemgetter(1)))

    @property
    def has_equal_stages(self) -> bool:
        """Whether all pipeline stages have the same layers, apart from embedding and head."""
        return len(self.kinds) == 1 and self.plan.pp_layers is None

    def layer_kinds(self, stage: int) -> dict[Layer, int]:
        if self.has_equal_stages:
            return {self.kinds[0]: self.model.num_layers // self.plan.pp}
        return dict(Counter(self.layers[n] for chunk in self.layers_of_stage(stage) for n in chunk))


class ModelKey:
    """A cache key that compares models by identity, which is faster than comparing their fields."""

    __slots__ = ("compress", "model")

    def __init__(self, model: ModelConfig, compress: CompressConfig | None = None) -> None:
        self.model, self.compress = model, compress

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        is_same = isinstance(other, ModelKey) and self.model is other.model
        return is_same and self.compress is other.compress


@lru_cache(maxsize=256)
def _spec_of(same: ModelKey) -> ModelSpec:
    return model_spec(same.model)


@dataclass(frozen=True)
class CacheKey:
    """A cache key that also carries the ``job``, from which the cached value is computed. Two keys are equal
    if their ``compared_by`` are equal, even if the jobs differ."""

    compared_by: tuple[object, ...]
    job: Job = field(compare=False)


def operations_key(job: Job) -> CacheKey:
    """Return the cache key for the time of a layer's operations, without communication."""
    return CacheKey((job.model_key, job.work, job.precision.compute), job)


def passes_key(job: Job) -> CacheKey:
    """Return the cache key for the time of a layer's passes, including communication."""
    plan = job.plan
    is_fetched = plan.sharding_stage == 3 and plan.sharding > 1
    fetched = (plan.sharding, plan.pp, job.overlap.values) if is_fetched else None
    layout = (plan.pp > 1, plan.sharding, plan.stage_size) if plan.ep > 1 else None
    return CacheKey((*operations_key(job).compared_by, fetched, layout), job)


def job_of(cfg: RunConfig, card: Card) -> Job:
    """Return the job that the configuration ``cfg`` describes, for a run on cards of the type ``card``."""
    model, mixed, batch = cfg.Model, cfg.Engine.mix_precision, cfg.batch
    precision = Precision()
    if card.kernels == "cpu":
        rounds = mixed.enable is True or (mixed.enable == "auto" and obstacle(mixed.dtype) is None)
        precision = Precision(rounds_matmuls=rounds and not mixed.matmuls_in_float32)
    elif mixed.enable is True or (mixed.enable and mixed.dtype in card.peak_tflops):
        precision = Precision(mixed.dtype, mixed.level == "O2", mixed.main_grad_fp32)
    return Job(
        model=model,
        plan=cfg.plan,
        micro_batch=batch.micro_batch_size,
        accumulate=batch.accumulate_steps,
        seq_len=sequence_length(cfg),
        precision=precision,
        recomputed=recompute_of(model),
        moments=mean_states(cfg),
        needs_whole_matrices=cfg.Optimizer.needs_whole_matrices,
        flash=uses_flash(model, precision, card),
        async_save=cfg.Engine.save_load.async_save,
        kernels=card.kernels,
        overlap=Overlap(
            cfg.Distributed.gradient_bucket_bytes,
            values=cfg.Distributed.sharding.broadcast_overlap,
            messages=cfg.Distributed.overlap_p2p_comm,
        ),
        compress=cfg.Compress,
    )


def mean_states(cfg: RunConfig) -> float:
    """Return the mean number of float32 optimizer states per trainable parameter."""
    trained = [spec for spec in parameter_specs(cfg.Model, cfg.Compress).values() if spec.trains]
    elements = sum(math.prod(spec.shape) for spec in trained)
    states = sum(math.prod(spec.shape) * cfg.Optimizer.states_of(spec.name, spec.kind) for spec in trained)
    return states / elements if elements else 0.0


def recompute_of(model: ModelConfig) -> tuple[Recompute, ...]:
    kind = model.recompute_granularity or "full"
    return tuple(kind if model.is_recomputed(layer) else "none" for layer in range(model.num_layers))


def uses_flash(model: ModelConfig, precision: Precision, card: Card) -> bool:
    """Return whether attention uses a flash attention kernel.

    False if ``attention_kernel`` is ``reference``. Also False for soft-capped scores, which no kernel
    supports. On a CPU, ppfleetx has its own kernel, for bfloat16 without dropout. On other cards, the kernel
    requires 16-bit activations. The device of a plugin is assumed to have no kernel.
    """
    if model.attention_kernel == "reference" or model.attn_logit_softcapping is not None:
        return False
    if card.kernels == "cpu":
        return precision.rounds_matmuls and model.attention_probs_dropout_prob == 0.0
    if precision.compute == "float32":
        return False
    return card.flash_efficiency > 0 and card.kernels != "plugin"
