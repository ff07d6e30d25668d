"""How many parameters each rank holds, trains and updates, from the shapes the model itself is built from."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from functools import lru_cache

from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.shape import parameter_shapes
from ppfleetx.planner.case import Case, SameModel

_WORD_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = "decoder.layers."
# What tensor parallelism leaves whole beside norms: biases that are added after a row-parallel sum.
_WHOLE_ENDINGS = ("out_proj.bias", "fc2.bias")


@dataclass(frozen=True)
class Held:
    """Parameters of one rank of one pipeline stage.

    Attributes:
        values: parameters of its part of the model.
        resident: those it has between steps: with sharding stage 3, the ones it owns.
        trained: those that train.
        owned: those of the trained ones whose states it keeps and that it updates.
        largest_layer: parameters of the largest model stage, which sharding stage 3 fetches at once.
        largest: elements of the largest parameter.
        num_tensors: number of its parameters.
        whole: trained ones that every tensor-parallel rank holds whole.
        partial: those of them whose gradients are parts of a sum with sequence parallelism.
    """

    values: int
    resident: int
    trained: int
    owned: int
    largest_layer: int
    largest: int
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
    edges, layer = _local_sizes(model, mp)
    groups = [layer] * num_layers
    if first:
        groups.insert(0, edges["embedding"])
    if last:
        end = dict(edges["head"])
        if not first and model.tie_word_embeddings and not model.task.classifies:
            end[_WORD_EMBEDDING] = edges["embedding"][_WORD_EMBEDDING]
        groups.append(end)
    sizes = [size for group in groups for size in group.values()]
    whole = {
        f"{number}.{name}": size
        for number, group in enumerate(groups)
        for name, size in group.items()
        if _is_whole(name) and _trains(name, model)
    }
    trained = [size for group in groups for name, size in group.items() if _trains(name, model)]
    return Held(
        values=sum(sizes),
        resident=_largest_share(sizes, sharding) if fetches else sum(sizes),
        trained=sum(trained),
        owned=_largest_share(trained, sharding),
        largest_layer=max((sum(group.values()) for group in groups), default=0),
        largest=max(sizes, default=0),
        num_tensors=len(sizes),
        whole=sum(whole.values()),
        partial=sum(size for name, size in whole.items() if _is_partial(name)),
    )


@lru_cache(maxsize=256)
def layer_parameters(model: ModelConfig, mp: int) -> tuple[int, int]:
    """(elements, tensors) of one layer on one tensor-parallel rank."""
    _, layer = _local_sizes(model, mp)
    return sum(layer.values()), len(layer)


@lru_cache(maxsize=256)
def _local_sizes(model: ModelConfig, mp: int) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Elements on one rank: of the embedding and of the end, and of one layer, by name."""
    one = model.model_copy(update={"num_layers": 1})
    edges: dict[str, dict[str, int]] = {"embedding": {}, "head": {}}
    layer: dict[str, int] = {}
    for name, shape in parameter_shapes(one).items():
        size = math.prod(shape) // (1 if _is_whole(name) else mp)
        if name.startswith(_LAYER):
            layer[name.split(".", 3)[3]] = size
        else:
            edges["embedding" if name.startswith("embedding.") else "head"][name] = size
    return edges, layer


def _trains(name: str, model: ModelConfig) -> bool:
    return model.lora is None or ".lora." in name or name.startswith("score.")


def _is_whole(name: str) -> bool:
    if "norm" in name or "position_embeddings" in name or name.startswith("score."):
        return True
    if ".lora." in name:
        is_column = ".qkv." in name or ".fc1." in name
        return name.endswith(".a") == is_column  # the factor at the side that is not divided
    return name.endswith(_WHOLE_ENDINGS)


def _is_partial(name: str) -> bool:
    """Of those held whole: used where each rank has its part of the positions."""
    return "position_embeddings" not in name and "score." not in name


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
