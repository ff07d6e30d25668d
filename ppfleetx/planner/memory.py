"""Predict the memory that a rank of each pipeline stage needs on its card and on its host, by part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.models.gpt.spec import BlockSpec, model_spec
from ppfleetx.nn.activation_memory import Tape
from ppfleetx.nn.cost import Recompute, Work
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import Job, ModelKey
from ppfleetx.planner.parameters import Held, held_parameters, largest_layer

_BUCKET_BYTES = 64 << 20  # size of messages without overlap (distributed/collectives.py)
_GENERATORS_BYTES, _STREAMS_BYTES = 64 << 10, 51 << 10  # a rank's random generator states; more with mp > 1
_FRAGMENTS = 0.02
"""Memory lost to fragmentation, as a share of the allocated memory."""


@dataclass(frozen=True)
class StageMemory:
    """The memory that one rank of a pipeline stage needs, in bytes by part.

    Attributes:
        parameters: parameters in the data type of the passes.
        gradients: gradients that exist at the peak.
        masters: float32 master copies of 16-bit parameters.
        optimizer: optimizer states, without master copies.
        activations: activations kept for backward passes.
        logits: logits, and the tensors that the loss keeps for its backward pass.
        temporary: tensors that exist only during one pass.
        buffers: packed gradients that are being sent.
        context: memory of the driver and libraries.
        fragments: memory lost to fragmentation.
        host: host memory for offloaded states and background checkpoints.
        start: the peak while the model is built.
        save: the peak while a checkpoint is saved.
    """

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    activations: float
    logits: float
    temporary: float
    buffers: float
    context: float
    fragments: float
    host: float
    start: float
    save: float

    @property
    def tensors(self) -> float:
        """The peak bytes of tensors in a step, comparable with the peak that Paddle's allocator reports."""
        return self.total - self.context - self.fragments

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in CARD_PARTS)

    @property
    def peak(self) -> float:
        """The bytes that the card needs to build the model and to run a step."""
        return max(self.start, self.total)


CARD_PARTS = (
    "parameters",
    "gradients",
    "masters",
    "optimizer",
    "activations",
    "logits",
    "temporary",
    "buffers",
    "context",
    "fragments",
)


def stage_memory(job: Job, cluster: Cluster, stage: int) -> StageMemory:
    precision, plan = job.precision, job.plan
    held = held_parameters(job, stage)
    masters = held.owned * precision.master_bytes
    moments = held.owned * 4 * job.moments
    host = masters + moments if plan.sharding_offload else 0.0
    if job.async_save:
        host += held.owned * (4 * job.moments + max(precision.master_bytes, precision.parameter_bytes))
    if plan.sharding_offload:
        masters = moments = 0.0
    parts = {
        "parameters": held.resident * precision.parameter_bytes + held.stored,
        "masters": masters,
        "optimizer": moments,
        **_worst_moment(job, stage, held),
    }
    fragments = _fragments(job) * sum(parts.values())
    context = cluster.card.context_gib * GIB
    kept = parts["parameters"] + masters
    start = context + (1 + _fragments(job)) * _start(job, held, kept)
    save = context + (1 + _fragments(job)) * (kept + moments + _states_of_generators(plan))
    return StageMemory(**parts, context=context, fragments=fragments, host=host, start=start, save=save)


def _states_of_generators(plan: ParallelPlan) -> float:
    """Return the bytes needed to gather the states of all ranks' random generators for a checkpoint."""
    # Other tensors need no extra memory, because they are copied to the host one by one.
    each = _GENERATORS_BYTES + (_STREAMS_BYTES if plan.mp > 1 else 0)
    return (plan.world_size + 1.0) * each if plan.world_size > 1 else 0.0


def _start(job: Job, held: Held, kept: float) -> float:
    """Return the peak bytes while the model is built. The finished model needs ``kept`` bytes."""
    # A 16-bit parameter is initialized in float32. Its float32 values add to the peak unless they become the
    # master copy, which ``kept`` includes.
    drops = job.precision.parameter_bytes < 4 and (job.plan.sharding_offload or held.owned < held.resident)
    drawn = (kept * end / held.used + 4.0 * size for end, size in held.init_sizes) if drops else ()
    return max(4.0 * held.largest_layer, kept, *drawn)  # Paddle creates a layer in float32


def _fragments(job: Job) -> float:
    if job.fragments is not None:
        return job.fragments
    return 0.0 if job.kernels == "cpu" else _FRAGMENTS  # on a CPU, only the requested bytes count


def least_memory(job: Job, cluster: Cluster) -> float:
    """Return a lower bound of the memory that the fullest rank needs, in bytes. It holds for any micro batch
    size and recompute granularity."""
    precision, states = job.precision, 0.0
    if not job.plan.sharding_offload:
        states = precision.master_bytes + 4 * job.moments
    most = 0.0
    for stage in {0, job.plan.pp - 1}:
        held = held_parameters(job, stage)
        most = max(
            most,
            held.resident * precision.parameter_bytes
            + held.stored
            + kept_gradients(job, held)
            + held.owned * states,
        )
    return most + cluster.card.context_gib * GIB


def kept_gradients(job: Job, held: Held) -> int:
    """Return the bytes of gradients on a rank when the last backward pass ends."""
    each = job.precision.gradient_bytes
    if job.plan.sharding == 1 or job.plan.sharding_stage == 1:
        return held.trained * each
    # Gradients that other ranks own stay in buckets that are not full yet. Gradients of experts stay on all
    # ranks until the end of the step, because a pass can leave an expert without a gradient
    # (parallel/sharding.py).
    waiting = int((job.plan.sharding - 1) * _bucket_bytes(job) // each)
    if job.flat_states:
        return min(held.trained, held.owned + waiting) * each
    return (held.experts + min(held.dense, held.owned - held.owned_experts + waiting)) * each


def _bucket_bytes(job: Job) -> float:
    return job.overlap.bucket_bytes or _BUCKET_BYTES


def passes_in_flight(job: Job, stage: int) -> float:
    """Return the number of micro batches whose activations a pipeline stage holds at the peak.

    With v virtual stages, the activations of a micro batch in one virtual stage count as 1 / v (Korthikanti
    et al. 2022, §4.2.3).
    """
    p, v = job.plan.pp, job.plan.virtual_pp_degree
    if v == 1:
        return min(job.accumulate, p - stage)
    if job.forwards_first:
        return job.accumulate
    ahead = (p - stage - 1) * 2 + (v - 1) * p + 1
    return min(job.accumulate * v, ahead) / v


@dataclass(frozen=True)
class _EqualLayers:
    """The layers of one kind in a virtual stage. All keep the same activations.

    Attributes:
        tape: the operations of one of the layers, for the memory simulation.
        count: the number of layers.
        everywhere: whether every virtual stage of the pipeline stage has these layers. False for the
            embedding and the head.
    """

    tape: Tape
    count: int
    everywhere: bool = False


def _chunk(job: Job, stage: int) -> list[_EqualLayers]:
    """Return the layers of the largest virtual stage on pipeline stage ``stage``, grouped by kind. Each
    virtual stage is assumed to have an equal share of each kind."""
    v, work = job.plan.virtual_pp_degree, job.work
    runs = []
    if stage == 0:
        runs.append(_EqualLayers(_embedding_tape(ModelKey(job.model), work), 1))
    kinds = job.layer_kinds(stage).items()
    runs += [_EqualLayers(block_tape(*layer, work), -(-count // v), True) for layer, count in kinds if count]
    if stage == job.plan.pp - 1:
        runs.append(_EqualLayers(_end_tape(ModelKey(job.model), work), 1))
    return runs


@lru_cache(maxsize=2048)
def block_tape(block: BlockSpec, recompute: Recompute, work: Work) -> Tape:
    return block.tape(work, recompute)


@lru_cache(maxsize=1024)
def _embedding_tape(same: ModelKey, work: Work) -> Tape:
    return model_spec(same.model).embedding.tape(work)


@lru_cache(maxsize=1024)
def _end_tape(same: ModelKey, work: Work) -> Tape:
    return model_spec(same.model).end_tape(work)


def _worst_moment(job: Job, stage: int, held: Held) -> dict[str, float]:
    """Return the memory that changes during a step, such as activations and gradients, at the moment when its
    sum is largest: ``{part: bytes}``, with the parts of :class:`StageMemory`."""
    gradients = kept_gradients(job, held)
    # After the passes, packed gradients are sent.
    moments = [
        {
            "gradients": gradients,
            "activations": 0.0,
            "logits": 0.0,
            "temporary": 0.0,
            "buffers": _buffers(job, held),
        }
    ]
    runs, in_flight = _chunk(job, stage), passes_in_flight(job, stage)
    v, last = job.plan.virtual_pp_degree, stage == job.plan.pp - 1
    kept = sum(run.tape.kept * run.count for run in runs)
    whole = kept + (v - 1) * sum(run.tape.kept * run.count for run in runs if run.everywhere)
    others = whole * in_flight - kept + _waiting_for_weights(job, stage) + _bytes_in_transit(job, stage)
    chunk = whole / v
    logits = runs[-1].tape.kept if last else 0.0
    passes = [(others, True)]
    if job.accumulate > 1:
        rhythm = job.accumulate > in_flight
        passes.append((others if rhythm else others - chunk, False))
    for beside, first in passes:
        there = 0.0 if first else gradients
        forward = not first or job.accumulate == 1
        fetched = _fetched(job, held)
        peak, grown = _pass_peak(
            runs, first=first, forward=forward, most_gradients=gradients, fetched_bytes=fetched
        )
        beyond = peak - kept - (grown if first else 0.0)
        # At a peak late in the backward pass, gradients have taken the place of activations, logits first.
        gone = max(0.0, -beyond)
        logits_here = max(0.0, logits - gone)
        kept_here = max(0.0, beside) + kept - gone
        moments.append(
            {
                "gradients": there + (grown if first else 0.0),
                "activations": kept_here - logits_here,
                "logits": logits_here,
                "temporary": max(0.0, beyond) + _rounded_weights(job, held),
                "buffers": 0.0,
            }
        )
    return max(moments, key=lambda parts: sum(parts.values()))


def _waiting_for_weights(job: Job, stage: int) -> float:
    """Return the bytes of tensors that ZB-H1 keeps to compute weight gradients later; 0 under other
    schedules."""
    if job.plan.pp_schedule != "zb_h1":
        return 0.0
    elements = 0.0
    for (block, _), count in job.layer_kinds(stage).items():
        elements += count * sum(operation.operands for operation in block.operations(job.work))
    if stage == job.plan.pp - 1:
        elements += sum(operation.operands for operation in job.spec.end_operations(job.work))
    # A stage keeps these tensors for as many micro batches as there are stages before it.
    micro_batches = min(stage, max(0, job.accumulate - (job.plan.pp - stage)))
    return micro_batches * elements * job.precision.activation_bytes


def _bytes_in_transit(job: Job, stage: int) -> float:
    """Return the bytes of pipeline messages in memory while a stage computes (``overlap_p2p_comm``)."""
    if not job.overlaps_messages:
        return 0.0
    # one input that has arrived early, and one output that is being sent
    return ((stage > 0) + (stage < job.plan.pp - 1)) * job.message_bytes


def _pass_peak(
    runs: list[_EqualLayers], *, first: bool, forward: bool, most_gradients: float, fetched_bytes: float
) -> tuple[float, float]:
    """Return (peak memory during the passes of one micro batch, gradients in it), in bytes.

    These are the gradients of the layers whose backward pass is complete at the peak. Only the first micro
    batch allocates gradients. For later micro batches, the peak does not include them, and the second number
    is 0.

    Args:
        first: whether this is the first micro batch, whose backward pass allocates the gradients.
        forward: whether to include the forward pass.
        most_gradients: upper limit of the bytes of gradients.
        fetched_bytes: bytes of parameters that are fetched during the passes.
    """
    before, peak, grown_at_peak = 0.0, 0.0, 0.0
    starts = []
    for run in runs:
        end = before + run.tape.kept * (run.count - 1)
        if forward:
            peak = max(peak, end + run.tape.forward_peak(fetched_bytes))
        starts.append((before, end))
        before = end + run.tape.kept
    grown = 0.0
    for run, (start, end) in zip(reversed(runs), reversed(starts), strict=True):
        need = run.tape.backward_peak(first=first, fetched_bytes=fetched_bytes)
        # During the backward pass of a run, activations shrink and gradients grow, each at a constant rate,
        # so the peak is at the last or the first layer.
        for below, later in ((end, 0), (start, run.count - 1)):
            here = min(most_gradients, grown + (later * run.tape.gradients if first else 0.0))
            if below + need + here > peak:
                peak, grown_at_peak = below + need + here, here
        grown += run.count * run.tape.gradients if first else 0.0
    return peak, grown_at_peak


def _rounded_weights(job: Job, held: Held) -> float:
    """Return the bytes of the 16-bit copies of weights that are kept during the passes of a step."""
    makes = job.precision.rounds_matmuls and not (job.plan.sharding > 1 and job.plan.sharding_stage == 3)
    return 2.0 * held.resident if makes else 0.0


def _fetched(job: Job, held: Held) -> float:
    """Return the bytes of parameters fetched for the current layer and, with overlap, for the next one; 0
    below sharding stage 3."""
    n = job.plan.sharding
    if n == 1 or job.plan.sharding_stage != 3:
        return 0.0
    ahead = largest_layer(job)[0] if job.overlap.values else 0
    return (held.largest_layer * (n - 1) / n + ahead) * job.precision.parameter_bytes


def _buffers(job: Job, held: Held) -> float:
    """Return the bytes of packed gradients that are being sent; 0 if gradients are not summed over ranks."""
    plan = job.plan
    if plan.dp == plan.sep == plan.sharding == 1:
        return 0.0
    buckets = 2 if plan.sharding_stage > 1 and job.overlap.bucket_bytes else 1
    return min(buckets * _bucket_bytes(job), held.trained * job.precision.gradient_bytes)
