"""Predict the time of one optimizer step under a parallel plan, by kind of work.

Overlapping communication is assumed not to slow the computation down. If the communication takes longer than
the computation, the difference is added to the time of the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.models.gpt.spec import BlockSpec
from ppfleetx.nn.cost import Operation, Recompute
from ppfleetx.nn.mlp_spec import MoESpec
from ppfleetx.planner.communication import (
    Cluster,
    all_reduce_seconds,
    all_to_all_seconds,
    expert_all_to_all_seconds,
    gather_seconds,
    group_of,
    independent_groups_per_node,
    message_seconds,
)
from ppfleetx.planner.job import CacheKey, Job, operations_key, passes_key
from ppfleetx.planner.parameters import Held, embedding_bytes, held_parameters, largest_layer
from ppfleetx.planner.timeline import Messages, Timeline, simulate


@dataclass(frozen=True)
class PassSeconds:
    forward: float
    backward: float


def waited_for_gradients(job: Job, stage: int, held: Held, one_sum: float, passes: PassSeconds) -> float:
    """Return the seconds that a step waits for gradient reductions on pipeline stage ``stage``.

    Args:
        one_sum: seconds of one reduction of all gradients, without overlap.
        passes: seconds of the passes of one micro batch on the stage.
    """
    rounds = job.accumulate if _leaves_in_every_pass(job) else 1
    bucket, whole = job.overlap.bucket_bytes, held.dense * job.precision.gradient_bytes
    if bucket is None or not whole:
        return rounds * one_sum
    if _leaves_in_every_pass(job):
        # Each owner has one open bucket, on average half full, which is sent after the last pass.
        last = min(1.0, job.plan.sharding * bucket / 2 / whole)
        between = max(0.0, one_sum - passes.forward - passes.backward)
        return (rounds - 1) * between + max(one_sum - passes.backward, one_sum * last)
    # Sending starts when the first bucket is full; the last bucket is sent after the pass.
    first = min(1.0, bucket / 2 / whole)
    last = min(1.0, max(bucket / 2, embedding_bytes(job, stage)) / whole)
    return max(one_sum - passes.backward * (1 - first), one_sum * last)


def waited_for_parameters(job: Job, stage: int, held: Held, sending: float, passes: PassSeconds) -> float:
    """Return the seconds that the next step waits for updated parameters under sharding stages 1 and 2.

    Args:
        stage: the pipeline stage.
        sending: seconds to send all updated parameters, without overlap.
        passes: seconds of the passes of one micro batch on the stage.
    """
    whole = held.trained * job.precision.gradient_bytes
    if not job.overlap.values or not whole:
        return sending
    return max(sending - passes.forward, sending * min(1.0, embedding_bytes(job, stage) / whole))


def waited_for_layer(job: Job, fetching: float, computing: float) -> float:
    """Return the seconds that a layer waits for its parameters under sharding stage 3.

    ``fetching`` is the time to fetch the parameters of a layer; ``computing`` is the time to compute a layer.
    """
    return max(0.0, fetching - computing) if job.overlap.values else fetching


def _leaves_in_every_pass(job: Job) -> bool:
    return job.plan.sharding > 1 and job.plan.sharding_stage > 1


_LOW, _HIGH = 0.93, 1.10
"""The bounds of the likely step time, as factors of the predicted time. Nine of ten published step times are
within them (``docs/planner.md``)."""
_HIGH_PER_DOUBLING = 0.12
"""The increase of the upper bound for each doubling of the number of tensor-parallel groups that share a node
(:func:`ppfleetx.planner.communication.independent_groups_per_node`).
"""


def spread(job: Job, cluster: Cluster) -> tuple[float, float]:
    """Return the lower and the upper bound of the likely step time, as factors of the predicted time."""
    # In published runs with several tensor-parallel groups on a node, some micro batches took up to two
    # thirds longer than predicted, for unknown reasons.
    return _LOW, _HIGH + _HIGH_PER_DOUBLING * math.log2(independent_groups_per_node(job.plan, cluster))


@dataclass(frozen=True)
class Passes:
    """The seconds of one forward or backward pass of a micro batch, by kind of work."""

    matmul: float = 0.0
    memory: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    parameters: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in PARTS)

    def __add__(self, other: Passes) -> Passes:
        return Passes(*(getattr(self, name) + getattr(other, name) for name in PARTS))

    def times(self, factor: float) -> Passes:
        return Passes(*(getattr(self, name) * factor for name in PARTS))


PARTS = ("matmul", "memory", "tensor_parallel", "context_parallel", "expert_parallel", "parameters")


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one optimizer step.

    Attributes:
        parts: seconds by kind of work. Forward and backward parts are those of the busiest pipeline stage.
            The parts except ``parts["recompute"]`` add up to ``seconds``. The time of recomputation is also
            contained in other parts, such as ``matmul``.
        timeline: the simulated passes of the pipeline.
        bubble: the fraction of the timeline in which a stage is idle, averaged over the stages. Time spent on
            messages is not counted as idle. (``parts["bubble"]`` is in seconds, for the busiest stage.)
        spread: lower and upper bound of the likely time, as multiples of ``seconds``.
    """

    seconds: float
    parts: dict[str, float]
    timeline: Timeline
    bubble: float
    spread: tuple[float, float]

    @property
    def interval(self) -> tuple[float, float, float]:
        return self.seconds * self.spread[0], self.seconds, self.seconds * self.spread[1]

    @property
    def exposed_communication(self) -> float:
        names = (*PARTS[2:], "pipeline", "gradients", "values")
        return sum(self.parts[name] for name in names)


def step_time(job: Job, cluster: Cluster, *, whole_timeline: bool = False) -> StepTime:
    plan = job.plan
    forward, backward, again = _stage_passes(job, cluster)
    f_seconds = [[p.total for p in stage] for stage in forward]
    b_seconds = [[p.total for p in stage] for stage in backward]
    schedule = partial(
        simulate,
        f_seconds,
        b_seconds,
        job.accumulate,
        whole=whole_timeline,
        forwards_first=job.forwards_first,
        weights=_weight_seconds(job, cluster) if plan.pp_schedule == "zb_h1" else None,
    )
    sent = _messages(job, cluster)
    timeline = schedule(sent)
    worst = max(range(plan.pp), key=lambda i: sum(f_seconds[i]) + sum(b_seconds[i]))
    spent = sum((*forward[worst], *backward[worst]), Passes()).times(job.accumulate)
    repeated = sum(p.total for p in again[worst]) * job.accumulate
    messages = sent.seconds * job.accumulate * _num_messages(plan, worst)
    if job.overlaps_messages:
        messages = timeline.seconds - schedule(Messages(0.0)).seconds
    messages = max(0.0, min(messages, timeline.seconds - spent.total))
    held = [held_parameters(job, stage) for stage in range(plan.pp)]
    ways = [PassSeconds(sum(f), sum(b)) for f, b in zip(f_seconds, b_seconds, strict=True)]
    gradients, update, values, after = _after_passes(
        job, cluster, dict(enumerate(zip(held, ways, strict=True)))
    )
    parts = {name: getattr(spent, name) for name in PARTS}
    parts |= {"pipeline": messages, "bubble": timeline.seconds - spent.total - messages}
    parts |= {"gradients": gradients, "optimizer": update, "values": values}
    seconds = timeline.seconds + after
    parts["stragglers"] = seconds * (cluster.straggling(plan.world_size) - 1)
    seconds += parts["stragglers"]
    busy = sum(sum(f) + sum(b) for f, b in zip(f_seconds, b_seconds, strict=True)) * job.accumulate / plan.pp
    share = max(0.0, 1 - (busy + messages) / timeline.seconds) if plan.pp > 1 else 0.0
    return StepTime(seconds, {**parts, "recompute": repeated}, timeline, share, spread(job, cluster))


def _num_messages(plan: ParallelPlan, stage: int) -> int:
    """Return the number of messages that a pipeline stage sends for one micro batch: outputs, except of the
    model's last virtual stage, and gradients, except of its first."""
    ends = (stage == 0) + (stage == plan.pp - 1)
    return 2 * plan.virtual_pp_degree - ends if plan.pp > 1 else 0


def estimate_seconds(job: Job, cluster: Cluster) -> float:
    """Estimate the seconds of one optimizer step without simulating the pipeline schedule."""
    plan, same = job.plan, passes_key(job)
    layer = {kind: _seconds(_layer_passes(same, cluster, *kind)) for kind in job.kinds}
    ways: dict[int, PassSeconds] = {}
    for stage in (0, plan.pp - 1) if plan.pp > 1 else (0,):
        counts = job.layer_kinds(stage).items()
        parts = [tuple(count * seconds for seconds in layer[kind]) for kind, count in counts]
        parts += [_seconds(_edge_passes(same, cluster, "first"))] if stage == 0 else []
        parts += [_seconds(_edge_passes(same, cluster, "last"))] if stage == plan.pp - 1 else []
        ways[stage] = PassSeconds(*(sum(way) for way in zip(*parts, strict=True)))
    stages = [way.forward + way.backward for way in ways.values()]
    # The slower of the first and the last stage determines the time per micro batch.
    total = job.accumulate * max(stages)
    if plan.pp > 1:
        message = _messages(job, cluster).seconds
        shown = 1 - 1 / plan.pp if job.overlaps_messages else 1.0  # share of messages that are waited for
        total += 2 * message * (shown * plan.virtual_pp_degree * job.accumulate + plan.pp - 1)
        # The pipeline fills and drains in the time of pp - 1 micro batches on one virtual stage.
        filling = min(stages) / plan.virtual_pp_degree
        if plan.pp_schedule == "zb_h1":
            # Stages compute weight gradients in some of this time.
            filling -= 2 * min(_weight_seconds(job, cluster))
        total += (plan.pp - 1) * filling
    ranks = {stage: (held_parameters(job, stage), way) for stage, way in ways.items()}
    return (total + _after_passes(job, cluster, ranks)[-1]) * cluster.straggling(plan.world_size)


def _seconds(passes: tuple[Passes, Passes, Passes]) -> tuple[float, float]:
    return passes[0].total, passes[1].total


def _after_passes(
    job: Job, cluster: Cluster, ranks: Mapping[int, tuple[Held, PassSeconds]]
) -> tuple[float, float, float, float]:
    """Return the seconds of a step that are not spent on passes: (gradient reduction, optimizer update,
    sending updated parameters, total). ``ranks`` maps a stage to the parameters of one of its ranks and the
    time of its passes."""
    gradients = max(_gradient_seconds(job, cluster, stage, *rank) for stage, rank in ranks.items())
    update = max(_update_seconds(job, cluster, held) for held, _ in ranks.values())
    values = max(_value_seconds(job, cluster, stage, *rank) for stage, rank in ranks.items())
    return gradients, update, values, gradients + update + values


def _stage_passes(job: Job, cluster: Cluster) -> tuple[list[list[Passes]], ...]:
    """Return the times of one micro batch: (forward pass, backward pass, recomputation), each as
    ``[stage][virtual stage]``.

    The backward times include recomputation.
    """
    same = passes_key(job)
    once = {kind: _layer_passes(same, cluster, *kind) for kind in job.kinds}
    stages: tuple[list[list[Passes]], ...] = ([], [], [])
    last = job.plan.pp - 1
    for stage in range(job.plan.pp):
        chunks = job.layers_of_stage(stage)
        for found in stages:
            found.append([])
        for number, layers in enumerate(chunks):
            sums = [Passes(), Passes(), Passes()]
            here = Counter(job.layers[layer] for layer in layers)
            for kind in job.kinds:
                sums = [s + p.times(here[kind]) for s, p in zip(sums, once[kind], strict=True)]
            if stage == 0 and number == 0:
                sums = [s + p for s, p in zip(sums, _edge_passes(same, cluster, "first"), strict=True)]
            if stage == last and number == len(chunks) - 1:
                sums = [s + p for s, p in zip(sums, _edge_passes(same, cluster, "last"), strict=True)]
            for found, value in zip(stages, sums, strict=True):
                found[-1].append(value)
    return stages


def _weight_seconds(job: Job, cluster: Cluster) -> list[float]:
    """Return, for each pipeline stage, the seconds that one backward pass spends on weight gradients."""
    # In the backward pass, each matmul becomes two, each as slow as the one in the forward pass.
    same, stages = operations_key(job), range(job.plan.pp)
    layer = {block: _products_seconds(same, cluster, block) for block, _ in job.kinds}
    kinds = [job.layer_kinds(stage).items() for stage in stages]
    seconds = [sum(layer[block] * count for (block, _), count in here) for here in kinds]
    seconds[-1] += _products_seconds(same, cluster, None)
    return seconds


@lru_cache(maxsize=4096)
def _products_seconds(same: CacheKey, cluster: Cluster, block: BlockSpec | None) -> float:
    """Return the seconds that the forward pass of ``block`` spends on matmuls with weights. If ``block`` is
    None, return those of the operations after the last block."""
    job = same.job
    operations = block.operations(job.work) if block else job.spec.end_operations(job.work)
    return _forward([o for o in operations if o.kind == "matmul"], job, cluster).total


@lru_cache(maxsize=4096)
def _layer_passes(
    same: CacheKey, cluster: Cluster, block: BlockSpec, recompute: Recompute
) -> tuple[Passes, Passes, Passes]:
    job = same.job
    forward, backward, again = _layer_computation(operations_key(job), cluster, block, recompute)
    communication = _layer_communication(job, cluster, block)
    forward += communication
    if recompute == "full":
        again += communication
    elif recompute == "full_attn":
        again += communication.times(0.5)
    backward += _layer_communication(job, cluster, block, backward=True) + again
    fetch = _fetch_seconds(job, cluster)
    before, later = (waited_for_layer(job, fetch, passes.total) for passes in (forward, backward))
    return forward + Passes(parameters=before), backward + Passes(parameters=later), again


@lru_cache(maxsize=4096)
def _layer_computation(
    same: CacheKey, cluster: Cluster, block: BlockSpec, recompute: Recompute
) -> tuple[Passes, Passes, Passes]:
    """Return the times of a layer's operations: (forward pass, backward pass without recomputation,
    recomputation)."""
    job = same.job
    operations = list(block.operations(job.work))
    repeated = [one for one in operations if one.is_repeated(recompute)]
    forward, backward = _forward(operations, job, cluster), _backward(operations, job, cluster)
    return forward, backward, _forward(repeated, job, cluster)


@lru_cache(maxsize=4096)
def _edge_passes(same: CacheKey, cluster: Cluster, edge: str) -> tuple[Passes, Passes, Passes]:
    job, spec, work = same.job, same.job.spec, same.job.work
    operations = spec.embedding.operations(work) if edge == "first" else spec.end_operations(work)
    sums = Passes(tensor_parallel=_activation_sum(job, cluster))
    return _forward(operations, job, cluster) + sums, _backward(operations, job, cluster) + sums, Passes()


def _forward(operations: Iterable[Operation], job: Job, cluster: Cluster) -> Passes:
    return _priced(((o, o.flops, o.num_bytes, o.kernels) for o in operations), job, cluster)


def _backward(operations: Iterable[Operation], job: Job, cluster: Cluster) -> Passes:
    """Return the time of the backward pass, with two matmuls for each matmul of the forward pass."""
    costs = ((o, o.backward_flops, o.backward_bytes, 2 * o.kernels) for o in operations)
    return _priced(costs, job, cluster)


_SCORES_STREAMED = 0.2
"""Fraction of the attention scores' memory traffic that does not overlap with their matmuls (fitted)."""


def _priced(costs: Iterable[tuple[Operation, float, float, float]], job: Job, cluster: Cluster) -> Passes:
    """Return the seconds of one pass, summed over operations by kind of work. Each operation is given as
    (operation, FLOPs, bytes moved, kernel count)."""
    card, dtype = cluster.card, job.precision.compute
    matmul = memory = 0.0
    for o, flops, moved, kernels in costs:
        if o.kind == "elementwise":
            memory += card.memory_seconds(moved, kernels)
        elif o.kind == "flash":
            latency = kernels * card.matmul_latency_us * 1e-6
            matmul += flops / (card.peak(dtype) * card.flash_efficiency) + latency
        else:
            streamed = _SCORES_STREAMED * moved / (card.memory_gb_s * 1e9) if o.kind == "scores" else 0.0
            matmul += card.matmul_seconds(flops, dtype, o.narrowest, kernels) + streamed
    return Passes(matmul, memory)


def _activation_sum(job: Job, cluster: Cluster) -> float:
    """Return the seconds of one tensor-parallel all-reduce of hidden states.

    Under sequence parallelism, a reduce-scatter and an all-gather replace the all-reduce. Together, they take
    the same time.
    """
    return all_reduce_seconds(job.hidden_bytes, group_of(job.plan, "mp", cluster), cluster)


def _layer_communication(job: Job, cluster: Cluster, block: BlockSpec, *, backward: bool = False) -> Passes:
    """Return the seconds of one layer's communication in a forward or backward pass.

    Under sequence parallelism, the backward pass also gathers the inputs of column-parallel matmuls.
    """
    routed = isinstance(block.mlp, MoESpec)
    pairs = 1 if routed and block.mlp.shared is None else 2
    sums = pairs * _activation_sum(job, cluster)
    if backward and job.plan.sequence_parallel:
        mp = group_of(job.plan, "mp", cluster)
        sums += pairs * gather_seconds(job.hidden_bytes, mp, cluster)
    exchanges = 0.0
    if job.plan.sep > 1:
        group = group_of(job.plan, "sep", cluster)
        qkv, context = block.attention.exchanged_bytes(job.work)
        exchanges = all_to_all_seconds(qkv, group, cluster) + all_to_all_seconds(context, group, cluster)
    experts = _expert_exchange(job, cluster, block.mlp) if routed else 0.0
    return Passes(tensor_parallel=sums, context_parallel=exchanges, expert_parallel=experts)


def _expert_exchange(job: Job, cluster: Cluster, mlp: MoESpec) -> float:
    """Return the seconds that one pass of a layer spends on sending tokens to experts and receiving the
    results."""
    plan, sent = job.plan, mlp.sent_bytes(job.work)
    seconds = 2 * expert_all_to_all_seconds(sent, group_of(plan, "ep", cluster), cluster)
    # The ranks among which an expert is sliced gather the tokens and sum the results.
    seconds += 2 * gather_seconds(sent * plan.emp, group_of(plan, "emp", cluster), cluster)
    if not plan.sequence_parallel:
        # Each rank has sent only its share of the tokens.
        seconds += gather_seconds(job.hidden_bytes, group_of(plan, "mp", cluster), cluster)
    return seconds


def _messages(job: Job, cluster: Cluster) -> Messages:
    """Return the time of a message between pipeline stages, and whether senders wait until it has arrived."""
    if job.plan.pp == 1:
        return Messages(0.0)
    seconds = message_seconds(job.message_bytes, job.plan, cluster)
    if job.message_parts > 1:
        # The receivers gather the parts.
        seconds += gather_seconds(job.hidden_bytes, group_of(job.plan, "mp", cluster), cluster)
    waits = not job.overlaps_messages  # under ZB-H1, only for activations (parallel/pipeline_schedules.py)
    return Messages(seconds, waits, waits and job.plan.pp_schedule == "1f1b")


def _fetch_seconds(job: Job, cluster: Cluster) -> float:
    """Return the seconds to fetch the largest layer's parameters before a pass; 0 below sharding stage 3."""
    if job.plan.sharding_stage != 3 or job.plan.sharding == 1:
        return 0.0
    size, tensors = largest_layer(job)
    group = group_of(job.plan, "sharding", cluster)
    messages = min(tensors, job.plan.sharding)  # one from each owner
    latency = cluster.card.link_latency_us * 0.5e-6 * (messages - 1)
    return gather_seconds(size * job.precision.parameter_bytes, group, cluster) + latency


def _gradient_seconds(job: Job, cluster: Cluster, stage: int, held: Held, passes: PassSeconds) -> float:
    """Return the seconds of a step that pipeline stage ``stage`` spends on gradient reduction, without the
    time that overlaps with computation."""
    # Only the reduction ``early`` can overlap with the passes.
    plan, each = job.plan, job.precision.gradient_bytes
    if plan.sharding > 1:
        early = gather_seconds(held.dense * each, group_of(plan, "sharding", cluster), cluster)
        late = _replica_seconds(job, cluster, held.owned * each * held.dense / max(held.trained, 1))
    else:
        early, late = _replica_seconds(job, cluster, held.dense * each), 0.0
    if held.experts:
        sum_seconds = gather_seconds if plan.sharding > 1 else all_reduce_seconds
        late += sum_seconds(held.experts * each, group_of(plan, "edp", cluster), cluster)
    return waited_for_gradients(job, stage, held, early, passes) + late


def _replica_seconds(job: Job, cluster: Cluster, num_bytes: float) -> float:
    return sum(
        all_reduce_seconds(num_bytes, group_of(job.plan, axis, cluster), cluster) for axis in ("sep", "dp")
    )


def _value_seconds(job: Job, cluster: Cluster, stage: int, held: Held, passes: PassSeconds) -> float:
    """Return the seconds that the next step waits for updated parameters from other ranks. Returns 0 without
    sharding and under sharding stage 3."""
    if job.plan.sharding == 1 or job.plan.sharding_stage == 3:
        return 0.0
    group = group_of(job.plan, "sharding", cluster)
    each = job.precision.parameter_bytes
    sending = gather_seconds(held.dense * each, group, cluster)
    if held.experts:
        sending += gather_seconds(held.experts * each, group_of(job.plan, "edp", cluster), cluster)
    return waited_for_parameters(job, stage, held, sending, passes)


_HOST_SECONDS_PER_PARAMETER = 11e-9
"""Seconds per parameter of an AdamW update on the host with one thread (measured, docs/parallelism.md)."""


def _update_seconds(job: Job, cluster: Cluster, held: Held) -> float:
    """Return the seconds to compute the gradient norm, scale the gradients and update the parameters."""
    p, precision = held.owned, job.precision
    if job.plan.sharding_offload:
        return p * _HOST_SECONDS_PER_PARAMETER
    # Gradients are read twice; each state is read and written once.
    states = 2 * (4 * job.moments + max(precision.master_bytes, precision.parameter_bytes))
    moved = p * (states + precision.parameter_bytes + 2 * precision.gradient_bytes)
    return cluster.card.memory_seconds(moved, 12 * held.num_tensors)
