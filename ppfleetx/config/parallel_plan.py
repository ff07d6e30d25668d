"""Parallel plans, and the rules that a legal plan satisfies (:data:`LEGAL`).

Loading a configuration, the planner, the documentation and the test matrix all use these rules.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, product
from typing import Literal

from ppfleetx.config.errors import RuleError

AXES = ("dp", "pp", "sharding", "sep", "mp")
"""Order of the axes in a global rank, from the slowest to the fastest changing (fleet's order)."""

PipelineSchedule = Literal["1f1b", "zb_h1"]

_MAX_TRIED, _MAX_VARIED = 5_000, 500  # factorizations that nearest_plan tries
_OPTIONS = ("sharding_stage", "sequence_parallel", "virtual_pp_degree", "pp_schedule")

CONFIG_KEYS = {
    "dp": "Distributed.dp_degree",
    "mp": "Distributed.mp_degree",
    "pp": "Distributed.pp_degree",
    "sep": "Distributed.sep_degree",
    "sharding": "Distributed.sharding.sharding_degree",
    "ep": "Distributed.ep_degree",
    "expert_mp": "Distributed.expert_mp_degree",
    "emp": "Distributed.expert_mp_degree",
    "sharding_stage": "Distributed.sharding.sharding_stage",
    "sharding_offload": "Distributed.sharding.sharding_offload",
    "pp_layers": "Distributed.pp_layers",
    "sequence_parallel": "Model.sequence_parallel",
    "virtual_pp_degree": "Model.virtual_pp_degree",
    "pp_schedule": "Distributed.pp_schedule",
    "num_layers": "Model.num_layers",
    "num_heads": "Model.num_attention_heads",
    "num_groups": "Model.num_query_groups",
    "ffn_size": "Model.ffn_hidden_size",
    "num_experts": "Model.moe.num_experts",
    "expert_size": "Model.moe.expert_ffn_size",
    "padded_vocab": "Model.vocab_size_divisible_unit",
    "seq_len": "Data.Train.dataset.max_seq_len",
    "accumulate_steps": "Engine.accumulate_steps",
    "needs_whole_matrices": "Optimizer.name",
}
"""The configuration key of each field of a plan or of a workload."""

DEGREE_WORDS = {
    **{axis: axis for axis in ("dp", "mp", "pp", "sharding", "sep")},
    "stage": "sharding_stage",
    "vpp": "virtual_pp_degree",
    "ep": "ep",
    "emp": "expert_mp",
}
PLAN_WORDS = (*DEGREE_WORDS, "micro", "sp", "offload", "zb", "recompute")
"""The words that `ppfleetx plan --plan` accepts, as ``word=value``. DEGREE_WORDS maps words to fields of a
plan."""


@dataclass(frozen=True)
class ParallelPlan:
    """The degree of each kind of parallelism in a job.

    Attributes:
        sep: the number of ranks that split each sequence.
        pp_layers: the number of layers of each pipeline chunk; None: equal chunks.
        ep: the number of ranks among which the experts of a layer are divided.
        expert_mp: the number of ranks that slice each expert's matrices; None: ``mp``.
    """

    dp: int = 1
    mp: int = 1
    pp: int = 1
    sharding: int = 1
    sep: int = 1
    sharding_stage: int = 1
    sharding_offload: bool = False
    sequence_parallel: bool = False
    virtual_pp_degree: int = 1
    pp_layers: tuple[int, ...] | None = None
    pp_schedule: PipelineSchedule = "1f1b"
    ep: int = 1
    expert_mp: int | None = None

    @property
    def emp(self) -> int:
        """The number of ranks that slice each expert's matrices: ``expert_mp`` or, if it is None, ``mp``."""
        return self.mp if self.expert_mp is None else self.expert_mp

    @property
    def stage_size(self) -> int:
        """The number of processes of one pipeline stage."""
        return self.world_size // self.pp

    @property
    def world_size(self) -> int:
        return self.dp * self.mp * self.pp * self.sharding * self.sep

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks, which read different samples: dp x sharding."""
        return self.dp * self.sharding

    @property
    def num_chunks(self) -> int:
        """The number of chunks into which the pipeline divides the model's layers: pp x virtual_pp_degree."""
        return self.pp * self.virtual_pp_degree

    def layers_of_chunks(self, num_layers: int) -> tuple[int, ...]:
        """The number of layers of each pipeline chunk, in model order. Chunk c runs on stage ``c % pp``."""
        return self.pp_layers or (num_layers // self.num_chunks,) * self.num_chunks

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of the global rank ``rank`` along each axis (dp, pp, sharding, sep, mp)."""
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        """The data-parallel index of ``rank``, from 0 to ``data_size - 1``.

        Each batch is divided into ``data_size`` parts, and the rank reads the part with this index.
        """
        at = self.coordinates(rank)
        return at["dp"] * self.sharding + at["sharding"]

    def reports_loss(self, rank: int) -> bool:
        """Whether ``rank`` reports the loss: the first rank of the last pipeline stage."""
        at = self.coordinates(rank)
        return at["pp"] == self.pp - 1 and all(at[axis] == 0 for axis in AXES if axis != "pp")

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of global ranks that communicate along ``axis``, each as a list."""
        return [list(group) for group in self.iter_groups(axis)]

    def iter_groups(self, axis: str) -> Iterator[range]:
        stride = math.prod(getattr(self, name) for name in AXES[AXES.index(axis) + 1 :])
        length = stride * getattr(self, axis)
        for block in range(0, self.world_size, length):
            for start in range(block, block + stride):
                yield range(start, start + length, stride)

    def __str__(self) -> str:
        text = f"dp {self.dp}, mp {self.mp}, pp {self.pp}, sharding {self.sharding}"
        if self.sharding > 1:
            text += f" (stage {self.sharding_stage}{', offload' if self.sharding_offload else ''})"
        text += f", sep {self.sep}" if self.sep > 1 else ""
        text += f", ep {self.ep}" if self.ep > 1 else ""
        text += f", expert mp {self.emp}" if self.emp != self.mp else ""
        text += f", virtual pp {self.virtual_pp_degree}" if self.virtual_pp_degree > 1 else ""
        text += f", {self.pp_schedule}" if self.pp_schedule != "1f1b" else ""
        return text + (", sequence parallel" if self.sequence_parallel else "")


@dataclass(frozen=True)
class Workload:
    """The properties of a run that decide whether a parallel plan is legal. Most are sizes that the plan must
    divide evenly.

    A value of None is unknown and is not checked. ``num_groups`` is the number of key/value heads.
    ``num_experts`` of a dense model is 0. ``needs_whole_matrices`` says whether the optimizer updates whole
    matrices, as Muon does.
    """

    num_layers: int | None = None
    num_heads: int | None = None
    num_groups: int | None = None
    ffn_size: int | None = None
    padded_vocab: int | None = None
    seq_len: int | None = None
    accumulate_steps: int | None = None
    num_experts: int | None = None
    expert_size: int | None = None
    needs_whole_matrices: bool | None = None


@dataclass(frozen=True)
class PlanRule:
    """One condition that a legal parallel plan satisfies for a workload.

    Attributes:
        reads: the fields of the plan and the workload that the condition uses. The field that is most likely
            wrong comes first.
        sentence: the condition in words, as a format string for the values of these fields.
    """

    reads: tuple[str, ...]
    holds: Callable[[ParallelPlan, Workload], bool]
    sentence: str


def _divides(whole: str, axis: str, words: str) -> PlanRule:
    def holds(plan: ParallelPlan, work: Workload) -> bool:
        return getattr(work, whole) % getattr(plan, axis) == 0

    return PlanRule((axis, whole), holds, words)


LEGAL: tuple[PlanRule, ...] = (
    PlanRule(
        ("sharding_offload", "sharding_stage", "sharding"),
        lambda p, w: not p.sharding_offload or (p.sharding > 1 and p.sharding_stage > 1),
        "offload needs sharding_stage 2 or 3 and sharding_degree > 1 "
        "(they are {sharding_stage} and {sharding})",
    ),
    PlanRule(
        ("sharding_offload", "mp", "emp", "needs_whole_matrices"),
        lambda p, w: not (w.needs_whole_matrices and p.sharding_offload and max(p.mp, p.emp) > 1),
        "the optimizer needs whole matrices, which mp_degree {mp} and expert_mp_degree {emp} slice, and they "
        "cannot be gathered in host memory: set sharding_offload to False",
    ),
    PlanRule(
        ("sequence_parallel", "mp"),
        lambda p, w: not p.sequence_parallel or p.mp > 1,
        "sequence parallelism splits the sequence over the tensor-parallel ranks, so it needs "
        "mp_degree > 1 (it is {mp})",
    ),
    PlanRule(
        ("virtual_pp_degree", "pp"),
        lambda p, w: p.virtual_pp_degree == 1 or p.pp > 1,
        "virtual stages (virtual_pp_degree {virtual_pp_degree}) are parts of pipeline stages, so they need "
        "pp_degree > 1 (it is {pp})",
    ),
    PlanRule(
        ("pp_schedule", "pp"),
        lambda p, w: p.pp_schedule == "1f1b" or p.pp > 1,
        "{pp_schedule} is an order of pipeline stages, so it needs pp_degree > 1 (it is {pp})",
    ),
    PlanRule(
        ("pp_schedule", "virtual_pp_degree"),
        lambda p, w: p.pp_schedule == "1f1b" or p.virtual_pp_degree == 1,
        "{pp_schedule} is built for whole stages: virtual_pp_degree must be 1 (it is {virtual_pp_degree})",
    ),
    PlanRule(
        ("pp_layers", "pp", "virtual_pp_degree"),
        lambda p, w: p.pp_layers is None or len(p.pp_layers) == p.num_chunks,
        "one number of layers per pipeline stage and virtual stage: pp_degree {pp} x virtual_pp_degree "
        "{virtual_pp_degree} numbers",
    ),
    PlanRule(
        ("pp_layers", "num_layers"),
        lambda p, w: p.pp_layers is None or sum(p.pp_layers) == w.num_layers,
        "the layers of the stages must add up to num_layers {num_layers}",
    ),
    PlanRule(
        ("pp", "num_layers", "virtual_pp_degree"),
        lambda p, w: p.pp_layers is not None or w.num_layers % p.num_chunks == 0,
        "{num_layers} layers do not divide into pp_degree {pp} x virtual_pp_degree {virtual_pp_degree} equal "
        "parts; give the layers of each in Distributed.pp_layers",
    ),
    PlanRule(
        ("accumulate_steps", "virtual_pp_degree", "pp"),
        lambda p, w: p.virtual_pp_degree == 1 or w.accumulate_steps % p.pp == 0,
        "with virtual stages the number of micro batches (accumulate_steps {accumulate_steps}) must be a "
        "multiple of pp_degree {pp}",
    ),
    _divides("num_heads", "mp", "the {num_heads} attention heads must divide by mp_degree {mp}"),
    _divides("num_groups", "mp", "the {num_groups} key/value heads must divide by mp_degree {mp}"),
    _divides("ffn_size", "mp", "the MLP width {ffn_size} must divide by mp_degree {mp}"),
    PlanRule(
        ("ep", "num_experts"),
        lambda p, w: p.ep == 1 or w.num_experts > 0,
        "ep_degree {ep} divides the experts of Model.moe, and the model has none",
    ),
    PlanRule(
        ("expert_mp", "num_experts"),
        lambda p, w: p.expert_mp is None or w.num_experts > 0,
        "expert_mp_degree slices the experts of Model.moe, and the model has none",
    ),
    _divides("num_experts", "ep", "the {num_experts} experts must divide by ep_degree {ep}"),
    _divides(
        "expert_size", "emp", "the width of an expert {expert_size} must divide by expert_mp_degree {emp}"
    ),
    PlanRule(
        ("ep", "emp", "stage_size"),
        lambda p, w: p.stage_size % (p.ep * p.emp) == 0,
        "ep_degree {ep} x expert_mp_degree {emp} must divide the {stage_size} ranks of a pipeline stage "
        "(dp x sharding x sep x mp)",
    ),
    _divides("padded_vocab", "mp", "the padded vocabulary {padded_vocab} must divide by mp_degree {mp}"),
    PlanRule(
        ("sequence_parallel", "seq_len", "mp", "sep"),
        lambda p, w: not p.sequence_parallel or w.seq_len % (p.mp * p.sep) == 0,
        "sequence parallelism needs a sequence length ({seq_len}) that divides by mp_degree {mp} x "
        "sep_degree {sep}",
    ),
    _divides("seq_len", "sep", "the sequence length {seq_len} must divide by sep_degree {sep}"),
    PlanRule(
        ("sep", "num_groups", "mp"),
        lambda p, w: w.num_groups % (p.sep * p.mp) == 0,
        "the {num_groups} key/value heads must divide by sep_degree {sep} x mp_degree {mp}: attention "
        "exchanges sequence parts for heads",
    ),
)
"""All rules that a legal plan satisfies. Data parallelism and ZeRO sharding can be combined with every other
kind of parallelism."""


def violations(plan: ParallelPlan, work: Workload | None = None) -> list[RuleError]:
    """Return an error for each rule in :data:`LEGAL` that ``plan`` breaks. ``work`` has the sizes of the
    model and the run."""
    found, work = [], work or Workload()
    for rule in LEGAL:
        values = {key: getattr(plan if hasattr(plan, key) else work, key) for key in rule.reads}
        is_known = all(value is not None for key, value in values.items() if hasattr(work, key))
        if is_known and not rule.holds(plan, work):
            keys = tuple(CONFIG_KEYS[key] for key in rule.reads if key in CONFIG_KEYS)
            found.append(RuleError(keys, rule.sentence.format(**values)))
    return found


def enumerate_plans(world_size: int, work: Workload | None = None) -> list[ParallelPlan]:
    """List the legal parallel plans of ``world_size`` processes for the workload ``work``.

    Plans with ``pp_layers``, expert parallelism, ZB-H1 or more than two virtual stages per rank are left out.
    Plans with offload to host memory are listed only if :func:`_is_tried_with_offload` allows them.
    """
    plans = (
        plan for degrees in _factorizations(world_size) for plan in _with_options(ParallelPlan(*degrees))
    )
    return [plan for plan in plans if not violations(plan, work)]


def _factorizations(world_size: int) -> Iterator[tuple[int, int, int, int, int]]:
    """All (dp, mp, pp, sharding, sep) whose product is ``world_size``."""
    for mp in divisors(world_size):
        for pp in divisors(world_size // mp):
            for sharding in divisors(world_size // (mp * pp)):
                rest = world_size // (mp * pp * sharding)
                for sep in divisors(rest):
                    yield rest // sep, mp, pp, sharding, sep


@cache
def divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _with_options(plan: ParallelPlan) -> Iterator[ParallelPlan]:
    stages = (1, 2, 3) if plan.sharding > 1 else (1,)
    for stage, split_sequence, chunks in product(stages, (False, True), (1, 2)):
        full = replace(plan, sharding_stage=stage, sequence_parallel=split_sequence, virtual_pp_degree=chunks)
        yield full
        if _is_tried_with_offload(full):
            yield replace(full, sharding_offload=True)


def _is_tried_with_offload(plan: ParallelPlan) -> bool:
    """Whether :func:`enumerate_plans` also tries ``plan`` with offload to host memory."""
    # Offload does not change the messages between ranks, so the test matrix needs only some plans with it.
    return (
        plan.sharding_stage > 1
        and plan.dp == plan.sep == 1
        and plan.sequence_parallel == (plan.mp > 1)
        and (plan.virtual_pp_degree > 1) == (plan.pp > 1)
    )


def nearest_plan(plan: ParallelPlan, world_size: int, work: Workload | None = None) -> ParallelPlan:
    """Return a legal plan of ``world_size`` processes that is close to ``plan``.

    A plan that changes only the degrees of ``plan`` is preferred to one that changes other settings too.
    """
    kept = {key: getattr(plan, key) for key in _OPTIONS}
    near = heapq.nsmallest(_MAX_TRIED, _factorizations(world_size), key=partial(_distance, plan))
    same = (ParallelPlan(*degrees, **kept) for degrees in near if degrees[-1] == plan.sep)
    every = (option for degrees in near[:_MAX_VARIED] for option in _with_options(ParallelPlan(*degrees)))
    # First plans with the same settings, then with others, then pure data parallelism, which is always legal.
    candidates = chain(
        (one for one in same if one.sharding > 1 or one.sharding_stage == 1),
        (one for one in every if not one.sharding_offload),
        [ParallelPlan(dp=world_size)],
    )
    nearest = next(one for one in candidates if not violations(one, work))
    nearest = _with_experts(nearest, plan, work)
    offloading = replace(nearest, sharding_offload=True, sharding_stage=max(2, nearest.sharding_stage))
    return offloading if plan.sharding_offload and not violations(offloading, work) else nearest


def _with_experts(plan: ParallelPlan, like: ParallelPlan, work: Workload | None) -> ParallelPlan:
    """Return ``plan`` with degrees of expert parallelism that are legal and close to those of ``like``.

    ``ep`` is the largest legal divisor of ``like.ep``. ``expert_mp`` is ``like.expert_mp`` or, if that is not
    legal, 1. If no such pair of degrees is legal, ``plan`` is returned unchanged.
    """
    degrees = [ep for ep in reversed(divisors(like.ep)) if ep > 1]
    slices = dict.fromkeys((like.expert_mp, 1))
    choices = (replace(plan, ep=ep, expert_mp=emp) for ep, emp in product((*degrees, 1), slices))
    return next((choice for choice in choices if not violations(choice, work)), plan)


def _distance(plan: ParallelPlan, degrees: tuple[int, int, int, int, int]) -> float:
    """Return the distance from the degrees of ``plan`` to ``degrees``: the number of doublings and halvings,
    weighted by axis."""
    costs = zip(("dp", "mp", "pp", "sharding", "sep"), (1.0, 4.0, 4.0, 2.0, 8.0), degrees, strict=True)
    return sum(cost * abs(math.log2(degree / getattr(plan, axis))) for axis, cost, degree in costs)
