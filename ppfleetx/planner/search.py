"""Search legal parallel plans on a given number of cards, and rank the plans that fit into memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.parallel_plan import ParallelPlan, Workload, divisors, violations
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import Job
from ppfleetx.planner.memory import least_memory
from ppfleetx.planner.plan_to_config import GRANULARITIES
from ppfleetx.planner.prediction import Prediction
from ppfleetx.utils.progress_bar import track

MAX_CARDS = 131_072  # more than in any cluster today; a larger number is probably a typo
_MAX_MICRO_BATCH = 64
_TRIED_BELOW = 256  # numbers of cards that are tried where the given one has no plan
_SIMULATED = 40  # number of candidates with the best estimates, which are simulated for the final ranking


@dataclass
class SearchResult:
    """The best candidates found, and how many were considered.

    A candidate is a plan with one micro batch size and one recompute granularity.

    Attributes:
        best: the predictions for the best candidates, best first.
        plans: the number of plans.
        too_large: the number of plans that do not fit into memory with any micro batch size.
        fit, unfit: the numbers of candidates that fit into memory and that do not fit.
        slower: the number of candidates that were too slow to be among the best. Their memory was not
            checked.
        fewer_cards, other_batch: if there is no plan, the largest smaller number of cards with one (0: none
            was found), and a batch size near the given one with one.
    """

    best: tuple[Prediction, ...] = ()
    plans: int = 0
    too_large: int = 0
    fit: int = 0
    unfit: int = 0
    slower: int = 0
    fewer_cards: int = 0
    other_batch: int = 0

    @property
    def candidates(self) -> int:
        return self.fit + self.unfit + self.slower


class _Shortest:
    def __init__(self, size: int) -> None:
        self._size, self._heap, self._count = size, [], 0

    def has_no_room_for(self, score: float) -> bool:
        return len(self._heap) == self._size and score >= -self._heap[0][0]

    def add(self, score: float, prediction: Prediction) -> None:
        self._count += 1
        heapq.heappush(self._heap, (-score, -self._count, prediction))
        if len(self._heap) > self._size:
            heapq.heappop(self._heap)

    def in_order(self) -> list[Prediction]:
        return [prediction for *_, prediction in sorted(self._heap, reverse=True)]


def search(
    job: Job,
    cluster: Cluster,
    devices: int,
    *,
    goal: str = "time",
    keep: int = 10,
    asked_in: str = "--devices",
) -> SearchResult:
    """Find the best parallel plans to train the model of ``job`` on ``devices`` cards.

    Args:
        job: the model and the global batch size (``job.global_batch``). ``job.plan`` does not limit the
            search.
        goal: ``time`` to rank plans by the upper bound of their likely step time, ``memory`` to rank them by
            memory.
        keep: the largest number of candidates to return.
        asked_in: the command-line option that gives ``devices``, for error messages.

    Raises:
        ConfigError: there are more than :data:`MAX_CARDS` cards.
    """
    if devices > MAX_CARDS:
        raise ConfigError(f"plans are searched for at most {MAX_CARDS:,} cards", key=asked_in, value=devices)
    looking = _Search(job, cluster, goal, _Shortest(max(_SIMULATED, keep)), SearchResult())
    work = replace(job.workload, accumulate_steps=None)
    plans = _plans(job, work, devices, cluster.per_node)
    if goal == "time":  # ZB-H1 never needs less memory
        plans = _in_both_orders(plans)
    plans = list(plans)
    tried = track(plans, "search", total=len(plans), unit="plan")
    tight = [plan for plan in tried if looking.try_plan(plan)]
    for plan in tight:  # offload costs time in every step, so try it only where memory is short
        offloaded = replace(plan, sharding_offload=True)
        if not violations(offloaded, work):
            looking.try_plan(offloaded)
    best = looking.short.in_order()
    if goal == "time":
        best.sort(key=lambda prediction: prediction.likely_at_most)
    looking.found.best = tuple(best[:keep])
    if not plans:
        smaller = range(devices - 1, max(0, devices - 1 - _TRIED_BELOW), -1)
        looking.found.fewer_cards = next(
            (n for n in smaller if any(_plans(job, work, n, cluster.per_node))), 0
        )
        looking.found.other_batch = max(1, round(job.global_batch / devices)) * devices  # dp alone divides it
    return looking.found


@dataclass
class _Search:
    job: Job
    cluster: Cluster
    goal: str
    short: _Shortest
    found: SearchResult

    def try_plan(self, plan: ParallelPlan) -> bool:
        """Try ``plan`` with several micro batch sizes and recompute granularities, and keep the best
        candidates. Returns True if a checked candidate does not fit into memory, or if the plan was not
        tried because none of its candidates can fit."""
        self.found.plans += 1
        room = self.cluster.card.memory_gib * GIB
        if least_memory(replace(self.job, plan=plan), self.cluster) > room:
            self.found.too_large += 1
            return True
        every_fits = True
        for job in _batches(self.job, plan):
            every_fits &= self._try_recompute(job)
        return not every_fits

    def _try_recompute(self, job: Job) -> bool:
        """Try ``job``, a job with a plan and a micro batch size, with more and more recompute, and keep
        the best candidates. Returns False if a checked candidate does not fit into memory, otherwise True.

        A search for the fastest plan stops at the first candidate that fits or is too slow, because more
        recompute would be slower still.
        """
        all_fit = True
        for candidate in _recomputing(job):  # from the least recompute, which is fastest, to the most
            prediction = Prediction(candidate, self.cluster)
            if self.goal == "time" and self.short.has_no_room_for(prediction.estimated_at_most):
                self.found.slower += 1
                return all_fit
            if not prediction.fits:
                all_fit = False
                self.found.unfit += 1
                continue
            self.found.fit += 1
            score = prediction.estimated_at_most if self.goal == "time" else prediction.fullest
            self.short.add(score, prediction)
            if self.goal == "time":
                return all_fit
        return all_fit


def _batches(job: Job, plan: ParallelPlan) -> Iterator[Job]:
    local = job.global_batch // plan.data_size
    for micro in divisors(local):
        accumulate = local // micro
        if micro > _MAX_MICRO_BATCH:
            return
        if plan.virtual_pp_degree == 1 or accumulate % plan.pp == 0:
            yield replace(job, plan=plan, micro_batch=micro, accumulate=accumulate)


def _recomputing(job: Job) -> Iterator[Job]:
    for kind in GRANULARITIES:
        if job.flash and kind == "core_attn":
            continue  # flash attention keeps no scores, so nothing would be saved
        yield replace(job, recomputed=(kind,) * job.model.num_layers)


def _plans(job: Job, work: Workload, devices: int, per_node: int) -> Iterator[ParallelPlan]:
    """Yield legal parallel plans that divide the global batch evenly.

    Plans with unequal pipeline stages are left out. So are plans whose tensor-parallel groups span more than
    two nodes, because they are too slow.
    """
    for mp, pp, sep in product(divisors(devices), repeat=3):
        cut = mp * pp * sep
        if devices % cut or pp > job.model.num_layers or mp > 2 * per_node:
            continue
        data = devices // cut
        split = mp > 1 and job.seq_len % (mp * sep) == 0
        shape = ParallelPlan(mp=mp, pp=pp, sep=sep, sequence_parallel=split)
        if job.global_batch % data or violations(replace(shape, pp=1), work):
            continue
        for sharding, chunks in product(divisors(data), _virtual_stages(job, pp)):
            for stage in (1, 2, 3) if sharding > 1 else (1,):
                dense = replace(
                    shape,
                    dp=data // sharding,
                    sharding=sharding,
                    sharding_stage=stage,
                    virtual_pp_degree=chunks,
                )
                yield from _with_experts(dense, work)


def _with_experts(plan: ParallelPlan, work: Workload) -> Iterator[ParallelPlan]:
    """Yield ``plan`` with each legal ``ep``, with whole experts and with experts that are sliced over the
    ``mp`` ranks.

    For a model without experts, yield only ``plan``.
    """
    experts = work.num_experts or 1
    for ep, emp in product(divisors(experts), (None, 1) if experts > 1 and plan.mp > 1 else (None,)):
        divided = replace(plan, ep=ep, expert_mp=emp)
        if experts == 1 or not violations(divided, replace(work, num_layers=None)):
            yield divided


def _in_both_orders(plans: Iterable[ParallelPlan]) -> Iterator[ParallelPlan]:
    """Yield each plan with schedule 1F1B and, if it has a pipeline without virtual stages, with ZB-H1."""
    for plan in plans:
        yield plan
        if plan.pp > 1 and plan.virtual_pp_degree == 1:
            yield replace(plan, pp_schedule="zb_h1")


def _virtual_stages(job: Job, pp: int) -> tuple[int, ...]:
    layers = job.model.num_layers
    if layers % pp:
        return ()  # Distributed.pp_layers sets uneven stages
    return (1,) if pp == 1 else divisors(layers // pp)
