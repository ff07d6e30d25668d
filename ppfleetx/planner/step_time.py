"""Seconds of one optimizer step under a plan, part by part.

Tensor-parallel sums are waited for where they stand, as in the engine, and so are pipeline messages unless
the configuration lets them travel meanwhile (``overlap_p2p_comm``). Sums of gradients and values of sharding
count as far as the passes do not hide them (``overlapped_time.py``); of published runs, nothing is hidden.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from ppfleetx.models.gpt.spec import BlockSpec
from ppfleetx.nn.cost import Operation, Recompute
from ppfleetx.planner.case import Alike, Case
from ppfleetx.planner.network import (
    Cluster,
    all_reduce_seconds,
    all_to_all_seconds,
    gather_seconds,
    group_of,
    message_seconds,
    rival_groups,
)
from ppfleetx.planner.overlapped_time import (
    PassSeconds,
    waited_for_gradients,
    waited_for_layer,
    waited_for_values,
)
from ppfleetx.planner.parameters import Held, held_parameters, largest_layer
from ppfleetx.planner.timeline import Messages, Timeline, play

_LOW, _HIGH = 0.93, 1.10
"""Low and high end of the interval around the predicted step, from the errors on published runs
(``docs/planner.md``): nine of ten measurements lie within."""
_HIGH_PER_DOUBLING = 0.12
"""What is added to the high end each time the tensor-parallel groups double that share a node and its
network (:func:`ppfleetx.planner.network.rival_groups`)."""


def spread(case: Case, cluster: Cluster) -> tuple[float, float]:
    """Low and high end of the interval, as shares of the predicted step.

    The time of plans whose tensor-parallel groups share a node is less certain: the same plan was measured as
    predicted with some micro batches, and a fifth to two thirds slower with others, which no number of bytes
    explains. Nine of ten such runs lie below the high end.
    """
    return _LOW, _HIGH + _HIGH_PER_DOUBLING * math.log2(rival_groups(case.plan, cluster))


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward or backward pass of one micro batch, by what they are spent on."""

    matmul: float = 0.0
    memory: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    parameters: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.matmul + self.memory + self.tensor_parallel + self.context_parallel + self.parameters

    def __add__(self, other: Passes) -> Passes:
        return Passes(*(getattr(self, name) + getattr(other, name) for name in PARTS))

    def times(self, factor: float) -> Passes:
        """So many of them."""
        return Passes(*(getattr(self, name) * factor for name in PARTS))


PARTS = ("matmul", "memory", "tensor_parallel", "context_parallel", "parameters")


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one optimizer step.

    Attributes:
        seconds: the whole step.
        parts: what the fullest stage spends it on; they add up to ``seconds``.
        timeline: the passes of the pipeline.
        bubble: idle share of the passes' time.
        spread: low and high end of what is likely, as shares of ``seconds``.
    """

    seconds: float
    parts: dict[str, float]
    timeline: Timeline
    bubble: float
    spread: tuple[float, float]

    @property
    def interval(self) -> tuple[float, float, float]:
        """Low, predicted, high."""
        return self.seconds * self.spread[0], self.seconds, self.seconds * self.spread[1]

    @property
    def exposed_communication(self) -> float:
        """Seconds in which a rank waits for communication."""
        names = ("tensor_parallel", "context_parallel", "parameters", "pipeline", "gradients", "values")
        return sum(self.parts[name] for name in names)


def step_time(case: Case, cluster: Cluster, *, whole_timeline: bool = False) -> StepTime:
    """Predict the time of one optimizer step of ``case`` on ``cluster``."""
    plan = case.plan
    forward, backward, again = _stage_passes(case, cluster)
    f_seconds = [[p.total for p in stage] for stage in forward]
    b_seconds = [[p.total for p in stage] for stage in backward]
    schedule = partial(
        play,
        f_seconds,
        b_seconds,
        case.accumulate,
        whole=whole_timeline,
        forwards_first=case.forwards_first,
        weights=_weight_seconds(case, cluster) if plan.pp_schedule == "zb_h1" else None,
    )
    sent = _messages(case, cluster)
    timeline = schedule(sent)
    worst = max(range(plan.pp), key=lambda i: sum(f_seconds[i]) + sum(b_seconds[i]))
    spent = sum((*forward[worst], *backward[worst]), Passes()).times(case.accumulate)
    repeated = sum(p.total for p in again[worst]) * case.accumulate
    messages = 2 * sent.seconds * case.accumulate * plan.virtual_pp_degree
    if case.computes_on:
        messages = timeline.seconds - schedule(Messages(0.0)).seconds
    held = [held_parameters(case, stage) for stage in range(plan.pp)]
    ways = [PassSeconds(sum(f), sum(b)) for f, b in zip(f_seconds, b_seconds, strict=True)]
    gradients, update, values, after = _after_passes(
        case, cluster, dict(enumerate(zip(held, ways, strict=True)))
    )
    parts = {name: getattr(spent, name) for name in PARTS}
    parts |= {"pipeline": messages, "bubble": timeline.seconds - spent.total - messages}
    parts |= {"gradients": gradients, "optimizer": update, "values": values}
    seconds = timeline.seconds + after
    parts["stragglers"] = seconds * (cluster.straggling(plan.world_size) - 1)
    seconds += parts["stragglers"]
    busy = sum(sum(f) + sum(b) for f, b in zip(f_seconds, b_seconds, strict=True)) * case.accumulate / plan.pp
    share = max(0.0, 1 - (busy + messages) / timeline.seconds) if plan.pp > 1 else 0.0
    return StepTime(seconds, {**parts, "recompute": repeated}, timeline, share, spread(case, cluster))


def quick_seconds(case: Case, cluster: Cluster) -> float:
    """About the seconds of :func:`step_time`, without playing the schedule: what a search looks at first.

    The fullest stage sets the rhythm, the others' passes fill and drain the pipeline once.
    """
    plan, same = case.plan, Alike(case)
    layer = {kind: _seconds(_layer_passes(same, cluster, *kind)) for kind in case.kinds}
    ranks: dict[int, tuple[Held, PassSeconds]] = {}
    for stage in (0, plan.pp - 1) if plan.pp > 1 else (0,):
        counts = case.layer_kinds(stage).items()
        parts = [tuple(count * seconds for seconds in layer[kind]) for kind, count in counts]
        parts += [_seconds(_edge_passes(same, cluster, "first"))] if stage == 0 else []
        parts += [_seconds(_edge_passes(same, cluster, "last"))] if stage == plan.pp - 1 else []
        ranks[stage] = (
            held_parameters(case, stage),
            PassSeconds(*(sum(way) for way in zip(*parts, strict=True))),
        )
    stages = [ways.forward + ways.backward for _, ways in ranks.values()]
    total = case.accumulate * max(stages)
    if plan.pp > 1:
        message = _messages(case, cluster).seconds
        shown = 1 - 1 / plan.pp if case.computes_on else 1.0  # as many micro batches go round as stages
        total += 2 * message * (shown * plan.virtual_pp_degree * case.accumulate + plan.pp - 1)
        filling = min(stages) / plan.virtual_pp_degree
        if plan.pp_schedule == "zb_h1":
            filling -= 2 * min(_weight_seconds(case, cluster))
        total += (plan.pp - 1) * filling
    total += _after_passes(case, cluster, ranks)[-1]
    return total * cluster.straggling(plan.world_size)


def _seconds(passes: tuple[Passes, Passes, Passes]) -> tuple[float, float]:
    """Forward and backward pass."""
    return passes[0].total, passes[1].total


def _after_passes(
    case: Case, cluster: Cluster, ranks: Mapping[int, tuple[Held, PassSeconds]]
) -> tuple[float, float, float, float]:
    """Seconds of the sums of gradients, the update, the new values' way to their users, and all three, of the
    slowest of some stages."""
    gradients = max(_gradient_seconds(case, cluster, stage, *rank) for stage, rank in ranks.items())
    update = max(_update_seconds(case, cluster, held) for held, _ in ranks.values())
    values = max(_value_seconds(case, cluster, stage, *rank) for stage, rank in ranks.items())
    return gradients, update, values, gradients + update + values


def _stage_passes(case: Case, cluster: Cluster) -> tuple[list[list[Passes]], ...]:
    """Forward passes, backward passes and the recomputed share of the latter, ``[stage][virtual stage]``."""
    same = Alike(case)
    once = {kind: _layer_passes(same, cluster, *kind) for kind in case.kinds}
    forward, backward, again = [], [], []
    last = case.plan.pp - 1
    for stage in range(case.plan.pp):
        chunks = case.layers_of_stage(stage)
        rows: tuple[list[Passes], ...] = ([], [], [])
        for number, layers in enumerate(chunks):
            sums = [Passes(), Passes(), Passes()]
            here = Counter(case.layers[layer] for layer in layers)
            for kind in case.kinds:
                sums = [s + p.times(here[kind]) for s, p in zip(sums, once[kind], strict=True)]
            if stage == 0 and number == 0:
                sums = [s + p for s, p in zip(sums, _edge_passes(same, cluster, "first"), strict=True)]
            if stage == last and number == len(chunks) - 1:
                sums = [s + p for s, p in zip(sums, _edge_passes(same, cluster, "last"), strict=True)]
            for row, value in zip(rows, sums, strict=True):
                row.append(value)
        forward.append(rows[0])
        backward.append(rows[1])
        again.append(rows[2])
    return forward, backward, again


def _weight_seconds(case: Case, cluster: Cluster) -> list[float]:
    """Of each stage, the part of a backward pass that computes gradients of weights: half of what the
    products with weights take."""
    same, stages = Alike(case), range(case.plan.pp)
    layer = {block: _products_seconds(same, cluster, block) for block, _ in case.kinds}
    kinds = [case.layer_kinds(stage).items() for stage in stages]
    seconds = [sum(layer[block] * count for (block, _), count in here) for here in kinds]
    seconds[-1] += _products_seconds(same, cluster, None)
    return seconds


@lru_cache(maxsize=4096)
def _products_seconds(same: Alike, cluster: Cluster, block: BlockSpec | None) -> float:
    """Forward products with weights (None: of the end of the model), which take as long as one of the two
    products of the backward pass."""
    case = same.case
    operations = block.operations(case.work) if block else case.spec.end_operations(case.work)
    return _forward([o for o in operations if o.kind == "matmul"], case, cluster).total


@lru_cache(maxsize=4096)
def _layer_passes(
    same: Alike, cluster: Cluster, block: BlockSpec, recompute: Recompute
) -> tuple[Passes, Passes, Passes]:
    case = same.case
    operations = list(block.operations(case.work))
    communication = _layer_communication(case, cluster, block)
    forward = _forward(operations, case, cluster) + communication
    again = _forward([one for one in operations if one.is_repeated(recompute)], case, cluster)
    if recompute == "full":
        again += communication
    elif recompute == "full_attn":
        again += communication.times(0.5)
    backward = _backward(operations, case, cluster)
    backward += _layer_communication(case, cluster, block, backward=True) + again
    fetch = _fetch_seconds(case, cluster)
    before, later = (waited_for_layer(case, fetch, passes.total) for passes in (forward, backward))
    return forward + Passes(parameters=before), backward + Passes(parameters=later), again


@lru_cache(maxsize=4096)
def _edge_passes(same: Alike, cluster: Cluster, edge: str) -> tuple[Passes, Passes, Passes]:
    case, spec, work = same.case, same.case.spec, same.case.work
    operations = spec.embedding.operations(work) if edge == "first" else spec.end_operations(work)
    sums = Passes(tensor_parallel=_activation_sum(case, cluster))
    return _forward(operations, case, cluster) + sums, _backward(operations, case, cluster) + sums, Passes()


def _forward(operations: list[Operation], case: Case, cluster: Cluster) -> Passes:
    return sum((_price(o, o.flops, o.num_bytes, o.kernels, case, cluster) for o in operations), Passes())


def _backward(operations: list[Operation], case: Case, cluster: Cluster) -> Passes:
    """Two products for each of the forward pass: the input's gradient and the weight's."""
    total = Passes()
    for o in operations:
        total += _price(o, o.backward_flops, o.backward_bytes, 2 * o.kernels, case, cluster)
    return total


_SCORES_STREAMED = 0.2
"""Share of the scores' bytes whose way to memory and back the products of attention do not hide (fitted)."""


def _price(o: Operation, flops: float, moved: float, kernels: int, case: Case, cluster: Cluster) -> Passes:
    card, dtype = cluster.card, case.precision.compute
    if o.kind == "elementwise":
        return Passes(memory=card.memory_seconds(moved, kernels))
    if o.kind == "flash":
        latency = kernels * card.matmul_latency_us * 1e-6
        return Passes(matmul=flops / (card.peak(dtype) * card.flash_efficiency) + latency)
    seconds = card.matmul_seconds(flops, dtype, o.narrowest, kernels)
    streamed = _SCORES_STREAMED * moved / (card.memory_gb_s * 1e9) if o.kind == "scores" else 0.0
    return Passes(matmul=seconds + streamed)


def _activation_sum(case: Case, cluster: Cluster) -> float:
    """One tensor-parallel sum of the hidden states; with sequence parallelism as scatter and gather."""
    return all_reduce_seconds(case.trunk_bytes, group_of(case.plan, "mp", cluster), cluster)


def _layer_communication(case: Case, cluster: Cluster, block: BlockSpec, *, backward: bool = False) -> Passes:
    """Communication of one layer in one pass: two all-reduces along mp and two all-to-alls along sep. With
    sequence parallelism the backward pass all-gathers the inputs of both column-parallel products again."""
    sums = 2 * _activation_sum(case, cluster)
    if backward and case.plan.sequence_parallel:
        mp = group_of(case.plan, "mp", cluster)
        sums += 2 * gather_seconds(case.trunk_bytes, mp, cluster)
    exchanges = 0.0
    if case.plan.sep > 1:
        group = group_of(case.plan, "sep", cluster)
        qkv, context = block.attention.exchanged_bytes(case.work)
        exchanges = all_to_all_seconds(qkv, group, cluster) + all_to_all_seconds(context, group, cluster)
    return Passes(tensor_parallel=sums, context_parallel=exchanges)


def _messages(case: Case, cluster: Cluster) -> Messages:
    """Activations to the next stage, whose tensor ranks gather what came in parts, and gradients back. ZB-H1
    waits for what it sends forward alone (``parallel/pipeline_schedules.py``)."""
    if case.plan.pp == 1:
        return Messages(0.0)
    seconds = message_seconds(case.message_bytes, case.plan, cluster)
    if case.message_parts > 1:
        seconds += gather_seconds(case.trunk_bytes, group_of(case.plan, "mp", cluster), cluster)
    waits = not case.computes_on
    return Messages(seconds, waits, waits and case.plan.pp_schedule == "1f1b")


def _fetch_seconds(case: Case, cluster: Cluster) -> float:
    """Sharding stage 3: a layer's parameters come from their owners before each pass, one message each
    that has something of it."""
    if case.plan.sharding_stage != 3 or case.plan.sharding == 1:
        return 0.0
    size, tensors = largest_layer(case)
    group = group_of(case.plan, "sharding", cluster)
    messages = min(tensors, case.plan.sharding)
    latency = cluster.card.link_latency_us * 0.5e-6 * (messages - 1)
    return gather_seconds(size * case.precision.parameter_bytes, group, cluster) + latency


def _gradient_seconds(case: Case, cluster: Cluster, stage: int, held: Held, passes: PassSeconds) -> float:
    """Sums of gradients that a rank waits for: into the owners, over sep and replicas. Those over the
    replicas of owners come when the passes are over."""
    plan, each = case.plan, case.precision.gradient_bytes
    if plan.sharding > 1:
        into_owners = gather_seconds(held.trained * each, group_of(plan, "sharding", cluster), cluster)
        early, late = into_owners, _replica_seconds(case, cluster, held.owned * each)
    else:
        early, late = _replica_seconds(case, cluster, held.trained * each), 0.0
    return waited_for_gradients(case, stage, held, early, passes) + late


def _replica_seconds(case: Case, cluster: Cluster, num_bytes: float) -> float:
    return sum(
        all_reduce_seconds(num_bytes, group_of(case.plan, axis, cluster), cluster) for axis in ("sep", "dp")
    )


def _value_seconds(case: Case, cluster: Cluster, stage: int, held: Held, passes: PassSeconds) -> float:
    """Sharding stages 1 and 2: new values from their owners."""
    if case.plan.sharding == 1 or case.plan.sharding_stage == 3:
        return 0.0
    group = group_of(case.plan, "sharding", cluster)
    sending = gather_seconds(held.trained * case.precision.parameter_bytes, group, cluster)
    return waited_for_values(case, stage, held, sending, passes)


_HOST_SECONDS_PER_PARAMETER = 11e-9
"""AdamW on the host, one thread (measured, ``docs/parallelism.md``)."""


def _update_seconds(case: Case, cluster: Cluster, held: Held) -> float:
    """Norm, scaling and update: every state is read and written once, gradients are read twice."""
    p, precision = held.owned, case.precision
    if case.plan.sharding_offload:
        return p * _HOST_SECONDS_PER_PARAMETER
    states = 2 * (4 * case.moments + max(precision.master_bytes, precision.parameter_bytes))
    moved = p * (states + precision.parameter_bytes + 2 * precision.gradient_bytes)
    return cluster.card.memory_seconds(moved, 12 * held.num_tensors)
