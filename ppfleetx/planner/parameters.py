"""How many parameters each rank holds, trains and updates, from the shapes the model itself is built from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ppfleetx.models.gpt.shape import parameter_shapes
from ppfleetx.planner.case import Case

_WORD_EMBEDDING = "embedding.word_embeddings.weight"
# What tensor parallelism leaves whole: norms, positions, the bias that is added after a row-parallel sum.
_WHOLE_ENDINGS = ("out_proj.bias", "fc2.bias")


@dataclass(frozen=True)
class Held:
    """Parameters of one rank of one pipeline stage.

    Attributes:
        values: parameters it holds before sharding (what stage 3 divides).
        trained: those of them that train.
        owned: those of the trained ones whose states it keeps and that it updates.
        largest_layer: parameters of the largest model stage, which sharding stage 3 fetches at once.
        num_tensors: number of its parameters.
    """

    values: int
    trained: int
    owned: int
    largest_layer: int
    num_tensors: int


def held_parameters(case: Case, stage: int) -> Held:
    """What a rank of pipeline stage ``stage`` holds; of several sharding ranks, the one with most."""
    sizes = dict(_local_sizes(case, stage))
    model = case.model
    if model.lora is None:
        trained = sizes
    else:
        trained = {n: s for n, s in sizes.items() if ".lora." in n or n.startswith("score.")}
    total = sum(sizes.values())
    return Held(
        values=total,
        trained=sum(trained.values()),
        owned=_largest_share(list(trained.values()), case.plan.sharding),
        largest_layer=_largest_layer(sizes),
        num_tensors=len(sizes),
    )


def resident_values(case: Case, stage: int) -> int:
    """Parameters a rank has between steps: with sharding stage 3 those it owns, else all it holds."""
    sizes = [size for _, size in _local_sizes(case, stage)]
    if case.plan.sharding_stage == 3 and case.plan.sharding > 1:
        return _largest_share(sizes, case.plan.sharding)
    return sum(sizes)


def _local_sizes(case: Case, stage: int) -> Iterator[tuple[str, int]]:
    """(canonical name, elements) of each parameter a rank of the stage holds a slice of."""
    plan, layers = case.plan, {layer for chunk in case.layers_of_stage(stage) for layer in chunk}
    first, last = stage == 0, stage == plan.pp - 1
    tied = case.model.tie_word_embeddings and case.model.module != "GPTFinetuneModule"
    for name, shape in parameter_shapes(case.model).items():
        here = (
            int(name.split(".")[2]) in layers
            if name.startswith("decoder.layers.")
            else (first or (last and tied and name == _WORD_EMBEDDING))
            if name.startswith("embedding.")
            else last
        )
        if here:
            yield name, math.prod(shape) // (1 if _is_whole(name) else plan.mp)


def _is_whole(name: str) -> bool:
    if "norm" in name or "position_embeddings" in name or name.startswith("score."):
        return True
    if ".lora." in name:
        column = ".qkv." in name or ".fc1." in name
        return name.endswith(".a") == column  # the factor at the undivided side
    return name.endswith(_WHOLE_ENDINGS)


def _largest_share(sizes: list[int], ranks: int) -> int:
    """The most that a rank owns when whole parameters are dealt out, the largest first, each to the rank
    that has least (the rule of ``parallel/sharding.py``)."""
    if ranks == 1:
        return sum(sizes)
    load = [0] * ranks
    for size in sorted(sizes, reverse=True):
        load[load.index(min(load))] += size
    return max(load)


def _largest_layer(sizes: dict[str, int]) -> int:
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        key = ".".join(name.split(".")[:3]) if name.startswith("decoder.layers.") else name.split(".")[0]
        layers[key] = layers.get(key, 0) + size
    return max(layers.values(), default=0)
