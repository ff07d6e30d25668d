"""All legal plans of a number of cards, those that fit, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ppfleetx.config.plan import ParallelPlan, violations
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.case import Case, Recompute
from ppfleetx.planner.memory import least_memory
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.prediction import Prediction

_GRANULARITIES: tuple[Recompute, ...] = ("none", "core_attn", "full_attn", "full")
_MAX_MICRO_BATCH = 64
_PLAYED = 40  # of the quickly ranked plans, those whose schedule is played before the final ranking


@dataclass(frozen=True)
class Found:
    """Attributes: ``best`` first, and how many candidates were ``legal`` and how many of those ``fit``."""

    best: tuple[Prediction, ...]
    legal: int
    fit: int


def search(case: Case, cluster: Cluster, devices: int, *, goal: str = "time", keep: int = 10) -> Found:
    """The best plans of ``devices`` cards for the step that ``case`` describes.

    Args:
        case: model, global batch, precision; its own plan is where the search starts from and no more.
        cluster: the cards.
        devices: number of cards.
        goal: ``time`` (fastest first) or ``memory`` (least memory on the fullest card first).
        keep: how many to give.
    """
    legal = fit = 0
    best: list[tuple[float, int, Prediction]] = []
    for family in _families(case, devices, cluster):
        for candidate in family:
            legal += 1
            prediction = Prediction(candidate, cluster)
            if not prediction.fits:
                continue
            fit += 1
            score = prediction.quick_seconds if goal == "time" else prediction.fullest
            best.append((score, legal, prediction))
            if goal == "time":
                break  # the rest of the family recomputes more: slower
    best.sort(key=lambda entry: entry[:2])
    short = [prediction for _, _, prediction in best[: max(_PLAYED, keep)]]
    if goal == "time":
        short.sort(key=lambda prediction: prediction.time.seconds)
    return Found(tuple(short[:keep]), legal, fit)


def _families(case: Case, devices: int, cluster: Cluster) -> Iterator[Iterator[Case]]:
    """Candidates that differ in recompute alone, the least recompute first."""
    room = cluster.card.memory_gib * GIB
    for plan in _plans(case, devices, cluster.per_node):
        batch = case.global_batch
        if batch % plan.data_size or least_memory(replace(case, plan=plan), cluster) > room:
            continue
        local = batch // plan.data_size
        for micro in _divisors(local):
            if micro > _MAX_MICRO_BATCH:
                break
            fitted = case.with_plan(plan, micro)
            if not violations(plan, fitted.workload):
                yield _recomputing(fitted)


def _recomputing(case: Case) -> Iterator[Case]:
    for kind in _GRANULARITIES:
        if case.flash and kind == "core_attn":
            continue  # flash attention keeps no scores to forget
        yield replace(case, recomputed=(kind,) * case.model.num_layers)


def _plans(case: Case, devices: int, per_node: int) -> Iterator[ParallelPlan]:
    model, sizes = case.model, _divisors(devices)
    for mp, pp, sep in product(sizes, repeat=3):
        cut = mp * pp * sep
        if devices % cut or model.num_attention_heads % (mp * sep) or model.kv_heads % (mp * sep):
            continue
        if pp > model.num_layers or mp > 2 * per_node:
            continue
        data = devices // cut
        for sharding, chunks in product(_divisors(data), _virtual_stages(case, pp)):
            for stage in (1, 2, 3) if sharding > 1 else (1,):
                yield ParallelPlan(
                    dp=data // sharding,
                    mp=mp,
                    pp=pp,
                    sharding=sharding,
                    sep=sep,
                    sharding_stage=stage,
                    sequence_parallel=mp > 1 and case.seq_len % (mp * sep) == 0,
                    virtual_pp_degree=chunks,
                )


def _virtual_stages(case: Case, pp: int) -> list[int]:
    layers = case.model.num_layers
    if layers % pp:
        return []  # uneven stages are asked for by Distributed.pp_layers
    if pp == 1:
        return [1]
    return _divisors(layers // pp)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
