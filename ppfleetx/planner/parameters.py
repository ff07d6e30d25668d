"""How many parameters each rank holds, trains and updates, from the shapes the model itself is built from."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.shape import parameter_specs
from ppfleetx.nn.param_spec import REPLICATE, ParamSpec
from ppfleetx.planner.case import Case, SameModel

_WORD_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = "decoder.layers."


@dataclass(frozen=True)
class Held:
    """Parameters of one rank of one pipeline stage.

    Attributes:
        values: parameters of its part of the model.
        resident: those it has between steps: with sharding stage 3, the ones it owns.
        trained: those that train.
        owned: those of the trained ones whose states it keeps and that it updates.
        largest_layer: parameters of the largest model stage, which sharding stage 3 fetches at once.
        fills: of each size of a parameter, how many elements all up to the last such one have together, and
            the size: the order in which parameters get their first values.
        num_tensors: number of its parameters.
        whole: trained ones that every tensor-parallel rank holds whole.
        partial: those of them whose gradients are parts of a sum with sequence parallelism.
    """

    values: int
    resident: int
    trained: int
    owned: int
    largest_layer: int
    fills: tuple[tuple[int, int], ...]
    num_tensors: int
    whole: int
    partial: int


def held_parameters(case: Case, stage: int) -> Held:
    """What a rank of pipeline stage ``stage`` holds; of several sharding ranks, the one with most."""
    plan = case.plan
    layers = sum(case.layer_kinds(stage).values())
    fetches = plan.sharding_stage == 3 and plan.sharding > 1
    if case.flat_states:
        whole = _held(SameModel(case.model), plan.mp, layers, stage == 0, stage == plan.pp - 1, 1, False)
        return replace(whole, owned=-(-whole.trained // plan.sharding))
    return _held(
        SameModel(case.model), plan.mp, layers, stage == 0, stage == plan.pp - 1, plan.sharding, fetches
    )


@lru_cache(maxsize=4096)
def _held(
    same: SameModel, mp: int, num_layers: int, first: bool, last: bool, sharding: int, fetches: bool
) -> Held:
    model = same.model
    edges, layer = _local(model, mp)
    groups = [layer] * num_layers
    if first:
        groups.insert(0, edges["embedding"])
    if last:
        end = dict(edges["head"])
        if not first and model.tie_word_embeddings and not model.task.classifies:
            end[_WORD_EMBEDDING] = edges["embedding"][_WORD_EMBEDDING]
        groups.append(end)
    held = [one for group in groups for one in group.values()]
    sizes, trained = [one.size for one in held], [one for one in held if one.spec.trains]
    ends = dict(zip(sizes, accumulate(sizes), strict=True))
    whole = [one for one in trained if one.spec.lies("mp") == REPLICATE]
    return Held(
        values=sum(sizes),
        resident=_largest_share(sizes, sharding) if fetches else sum(sizes),
        trained=sum(one.size for one in trained),
        owned=_largest_share([one.size for one in trained], sharding),
        largest_layer=max((sum(one.size for one in group.values()) for group in groups), default=0),
        fills=tuple((end, size) for size, end in ends.items()),
        num_tensors=len(sizes),
        whole=sum(one.size for one in whole),
        partial=sum(one.size for one in whole if one.spec.sums("mp")),
    )


@lru_cache(maxsize=256)
def layer_parameters(model: ModelConfig, mp: int) -> tuple[int, int]:
    """(elements, tensors) of one layer on one tensor-parallel rank."""
    _, layer = _local(model, mp)
    return sum(one.size for one in layer.values()), len(layer)


class _Local(NamedTuple):
    """A parameter, and how many of its elements are on one tensor-parallel rank."""

    spec: ParamSpec
    size: int


@lru_cache(maxsize=256)
def _local(model: ModelConfig, mp: int) -> tuple[dict[str, dict[str, _Local]], dict[str, _Local]]:
    """What one rank has of the embedding and of the end, and of one layer, by name."""
    one = model.model_copy(update={"num_layers": 1})
    edges: dict[str, dict[str, _Local]] = {"embedding": {}, "head": {}}
    layer: dict[str, _Local] = {}
    for name, spec in parameter_specs(one).items():
        local = _Local(spec, math.prod(spec.shape) // (1 if spec.lies("mp") == REPLICATE else mp))
        if name.startswith(_LAYER):
            layer[name.split(".", 3)[3]] = local
        else:
            edges["embedding" if name.startswith("embedding.") else "head"][name] = local
    return edges, layer


def _largest_share(sizes: list[int], ranks: int) -> int:
    """The most that a rank owns when whole parameters are dealt out, the largest first, each to the rank
    that has least (the rule of ``parallel/sharding.py``)."""
    if ranks == 1:
        return sum(sizes)
    load = [0] * ranks
    heap = [(0, rank) for rank in range(ranks)]
    for size in sorted(sizes, reverse=True):
        least, rank = heapq.heappop(heap)
        load[rank] = least + size
        heapq.heappush(heap, (load[rank], rank))
    return max(load)
