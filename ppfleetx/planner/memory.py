"""The memory of a rank on each pipeline stage and of its host, part by part.

A layer's declaration says what the layer keeps and what it needs temporarily; this module computes which
layers, micro batches and gradients are in memory at the same time. The peak of a step is reached within the
passes, or while packed gradients are sent. The peak while the model is built is counted separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ppfleetx.config.plan import ParallelPlan
from ppfleetx.models.gpt.spec import BlockSpec, model_spec
from ppfleetx.nn.cost import Recompute, Work
from ppfleetx.nn.tape import Tape
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import Job, ModelKey
from ppfleetx.planner.parameters import Held, held_parameters, largest_layer

_BUCKET_BYTES = 64 << 20  # size of gradient buckets (distributed/collectives.py)
_GENERATORS_BYTES, _STREAMS_BYTES = 64 << 10, 51 << 10  # saved states of a rank's generators, and of mp's
_FRAGMENTS = 0.02
"""Memory lost to fragmentation, as a share of the allocated memory."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank, by part. :attr:`total` is the peak of a step, :attr:`peak` the peak of a run.

    Attributes:
        parameters: parameters in the type that the passes use.
        gradients: gradients kept between passes.
        masters: float32 master weights of 16-bit parameters.
        activations: activations kept for the backward passes of all micro batches in flight.
        logits: logits, and the tensors that the loss keeps.
        temporary: recomputed layers, gradients of activations and fetched parameters at the peak.
        buffers: packed gradients that are being sent.
        context: memory of the driver and libraries.
        host: host memory: offloaded states, copies for saving in the background.
        whole_gradients: gradients of all parameters after the last backward pass.
        start: the peak while the model is built, with context and fragments.
        save: the peak while a checkpoint is saved between steps.
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
    whole_gradients: float
    start: float
    save: float

    @property
    def tensors(self) -> float:
        """The bytes that Paddle's allocator hands out at the peak."""
        return self.total - self.context - self.fragments

    @property
    def total(self) -> float:
        """The peak of a step on the card, in bytes."""
        return sum(getattr(self, part) for part in CARD_PARTS)

    @property
    def peak(self) -> float:
        """The bytes that a card needs to build the model and for each step."""
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
    gradients = _kept_gradients(job, held) * precision.gradient_bytes
    fragments = _fragments(job) * sum(parts.values())
    context = cluster.card.context_gib * GIB
    kept = parts["parameters"] + masters
    start = context + (1 + _fragments(job)) * _start(job, held, kept)
    save = context + (1 + _fragments(job)) * (kept + moments + _states_of_generators(plan))
    return StageMemory(
        **parts,
        context=context,
        fragments=fragments,
        host=host,
        whole_gradients=gradients,
        start=start,
        save=save,
    )


def _states_of_generators(plan: ParallelPlan) -> float:
    """Bytes of the states of all ranks' random generators, which a save gathers. Tensors are copied to the
    host one by one and need no extra memory.
    """
    each = _GENERATORS_BYTES + (_STREAMS_BYTES if plan.mp > 1 else 0)
    return (plan.world_size + 1.0) * each if plan.world_size > 1 else 0.0


def _start(job: Job, held: Held, kept: float) -> float:
    """The peak while the model is built: the largest of three sums. (1) A stage of layers in float32, as
    Paddle creates it. (2) Everything kept in the end. (3) Everything kept so far plus the float32 values of a
    16-bit parameter whose master is kept elsewhere (``parallel/parallelize.py``).
    """
    drops = job.precision.parameter_bytes < 4 and (job.plan.sharding_offload or held.owned < held.resident)
    drawn = (kept * end / held.values + 4.0 * size for end, size in held.fills) if drops else ()
    return max(4.0 * held.largest_layer, kept, *drawn)


def _fragments(job: Job) -> float:
    if job.fragments is not None:
        return job.fragments
    return 0.0 if job.kernels == "cpu" else _FRAGMENTS  # on a CPU, the requested bytes count


def least_memory(job: Job, cluster: Cluster) -> float:
    """A lower bound on the fullest rank's memory for any micro batch and recompute, which a search checks
    first.
    """
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
            + _kept_gradients(job, held) * precision.gradient_bytes
            + held.owned * states,
        )
    return most + cluster.card.context_gib * GIB


def _kept_gradients(job: Job, held: Held) -> int:
    """The number of gradient elements on a rank when the last backward pass ends. From sharding stage 2 on,
    these are the gradients that the rank owns, and gradients of other owners that wait for a full bucket.
    """
    if job.plan.sharding == 1 or job.plan.sharding_stage == 1:
        return held.trained
    waiting = (job.plan.sharding - 1) * _BUCKET_BYTES // job.precision.gradient_bytes
    return min(held.trained, held.owned + waiting)


def passes_in_flight(job: Job, stage: int) -> float:
    """The number of micro batches whose activations a stage holds at the peak, averaged over its chunks
    (Korthikanti et al. 2022, §4.2.3). With p pipeline ranks, it is p - stage under 1F1B; with v virtual
    stages, it is p (1 + (p - 1) / (p v)) on the first stage.
    """
    p, v = job.plan.pp, job.plan.virtual_pp_degree
    if v == 1:
        return min(job.accumulate, p - stage)
    if job.forwards_first:
        return job.accumulate
    ahead = (p - stage - 1) * 2 + (v - 1) * p + 1
    return min(job.accumulate * v, ahead) / v


@dataclass(frozen=True)
class _Run:
    """``count`` equal layers in a row. ``everywhere``: all chunks contain them, not only the first or the
    last.
    """

    tape: Tape
    count: int
    everywhere: bool = False


def _chunk(job: Job, stage: int) -> list[_Run]:
    """The layers of a stage in order; with virtual stages, the layers of its largest chunk."""
    v, work = job.plan.virtual_pp_degree, job.work
    runs = []
    if stage == 0:
        runs.append(_Run(_embedding_tape(ModelKey(job.model), work), 1))
    kinds = job.layer_kinds(stage).items()
    runs += [_Run(block_tape(*layer, work), -(-count // v), True) for layer, count in kinds if count]
    if stage == job.plan.pp - 1:
        runs.append(_Run(_end_tape(ModelKey(job.model), work), 1))
    return runs


@lru_cache(maxsize=2048)
def block_tape(block: BlockSpec, recompute: Recompute, work: Work) -> Tape:
    """The activations that a block writes and keeps. The result is cached."""
    return block.tape(work, recompute)


@lru_cache(maxsize=1024)
def _embedding_tape(same: ModelKey, work: Work) -> Tape:
    return model_spec(same.model).embedding.tape(work)


@lru_cache(maxsize=1024)
def _end_tape(same: ModelKey, work: Work) -> Tape:
    return model_spec(same.model).end_tape(work)


def _worst_moment(job: Job, stage: int, held: Held) -> dict[str, float]:
    """The parts of memory that vary within a step, at the moment when their sum is largest."""
    gradients = _kept_gradients(job, held) * job.precision.gradient_bytes
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
        peak, grown = _pass_peak(runs, first=first, forward=forward, most_gradients=gradients, values=fetched)
        logits_here = logits if last else 0.0
        kept_here = max(0.0, beside) + kept
        temporary = peak - kept - (grown if first else 0.0)
        moments.append(
            {
                "gradients": there + (grown if first else 0.0),
                "activations": kept_here - logits_here,
                "logits": logits_here,
                "temporary": temporary,
                "buffers": 0.0,
            }
        )
    return max(moments, key=lambda parts: sum(parts.values()))


def _waiting_for_weights(job: Job, stage: int) -> float:
    """Bytes that ZB-H1 keeps for delayed weight gradients: the inputs and output gradients of products, for
    one micro batch per earlier stage.
    """
    if job.plan.pp_schedule != "zb_h1":
        return 0.0
    elements = 0.0
    for (block, _), count in job.layer_kinds(stage).items():
        elements += count * sum(operation.operands for operation in block.operations(job.work))
    if stage == job.plan.pp - 1:
        elements += sum(operation.operands for operation in job.spec.end_operations(job.work))
    micro_batches = min(stage, max(0, job.accumulate - (job.plan.pp - stage)))
    return micro_batches * elements * job.precision.activation_bytes


def _bytes_in_transit(job: Job, stage: int) -> float:
    """Bytes of messages with ``overlap_p2p_comm``: one input received early, and one output being sent."""
    if not job.overlaps_messages:
        return 0.0
    return ((stage > 0) + (stage < job.plan.pp - 1)) * job.message_bytes


def _pass_peak(
    runs: list[_Run], *, first: bool, forward: bool, most_gradients: float, values: float
) -> tuple[float, float]:
    """The peak bytes in the passes of one micro batch, and the bytes of gradients created in these passes
    that are part of the peak.
    """
    before, peak, grown_at_peak = 0.0, 0.0, 0.0
    starts = []
    for run in runs:
        end = before + run.tape.kept * (run.count - 1)
        if forward:
            peak = max(peak, end + run.tape.forward_peak(values))
        starts.append((before, end))
        before = end + run.tape.kept
    grown = 0.0
    for run, (start, end) in zip(reversed(runs), reversed(starts), strict=True):
        need = run.tape.backward_peak(first=first, values=values)
        # Within a run, activations shrink as gradients grow, so the peak is at the last or the first layer.
        for below, later in ((end, 0), (start, run.count - 1)):
            here = min(most_gradients, grown + (later * run.tape.weights if first else 0.0))
            if below + need + here > peak:
                peak, grown_at_peak = below + need + here, here
        grown += run.count * run.tape.weights if first else 0.0
    return peak, grown_at_peak


def _fetched(job: Job, held: Held) -> float:
    """Bytes of parameters fetched under sharding stage 3: those of one layer, and the next layer's on their
    way.
    """
    n = job.plan.sharding
    if n == 1 or job.plan.sharding_stage != 3:
        return 0.0
    ahead = largest_layer(job)[0] if job.overlap.values else 0
    return (held.largest_layer * (n - 1) / n + ahead) * job.precision.parameter_bytes


def _buffers(job: Job, held: Held) -> float:
    """Bytes of packed gradients that are being sent: one bucket, or two from sharding stage 2 on."""
    plan = job.plan
    if plan.dp == plan.sep == plan.sharding == 1:
        return 0.0
    buckets = 2 if plan.sharding_stage > 1 and job.overlap.bucket_bytes else 1
    return min(buckets * _BUCKET_BYTES, held.trained * job.precision.gradient_bytes)
