"""Count the parameters that a rank holds, trains and updates, without building the model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

from ppfleetx.config.mesh import EXPERTS, Mesh
from ppfleetx.models.gpt.spec import model_spec, parameter_specs
from ppfleetx.nn.param_spec import REPLICATE, Shard, assign_owners
from ppfleetx.planner.job import Job, ModelKey

_LAYER = "decoder.layers."
_BYTES = {"int8": 1, "uint8": 1, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Held:
    """The parameters that one rank of a pipeline stage holds, as numbers of elements unless stated otherwise.

    A rank owns the parameters that it updates under ZeRO.

    Attributes:
        used: elements that the rank needs in a pass, without quantized weights.
        resident: elements held between steps, without quantized weights.
        stored: bytes of quantized weights held between steps.
        trained: trainable elements.
        owned: trainable elements that the rank owns.
        largest_layer: elements of the largest layer.
        init_sizes: a pair (n, size) for each distinct parameter size, without quantized weights. In model
            order, the parameters up to and including the last one of this size have n elements in total. The
            peak memory of initialization is computed from these pairs.
        num_tensors: number of parameters.
        whole: trainable elements that every tensor-parallel rank holds in full.
        partial: trainable elements whose gradients are summed over ``mp`` under sequence parallelism.
        experts: trainable elements that belong to experts.
        owned_experts: owned elements that belong to experts.
    """

    used: int
    resident: int
    stored: int
    trained: int
    owned: int
    largest_layer: int
    init_sizes: tuple[tuple[int, int], ...]
    num_tensors: int
    whole: int
    partial: int
    experts: int = 0
    owned_experts: int = 0

    @property
    def dense(self) -> int:
        return self.trained - self.experts


class _Local(NamedTuple):
    """The part of one parameter that a tensor-parallel rank holds.

    Attributes:
        size: the number of elements.
        stored: bytes of a quantized weight; 0 for other parameters.
        whole: whether every tensor-parallel rank holds the whole parameter.
        partial: whether the parameter's gradients are summed over ``mp`` under sequence parallelism.
    """

    size: int
    stored: int
    trains: bool
    whole: bool
    partial: bool
    of_experts: bool


_Group = tuple[_Local, ...]


class _Groups(NamedTuple):
    """The parameters of each part of the model, as one tensor-parallel rank holds them.

    Attributes:
        end: the parameters after the blocks.
        words: the word embedding if the head is tied to it, otherwise empty. With several pipeline stages,
            the last stage has a copy of it.
    """

    embedding: _Group
    layers: tuple[_Group, ...]
    end: _Group
    words: _Group


def held_parameters(job: Job, stage: int) -> Held:
    """Return the parameter counts of a rank of pipeline stage ``stage``.

    If a count differs between the ranks of the stage, the largest one is returned.
    """
    plan, groups = job.plan, _groups(job.model_key, *_slices(job))
    first, last = stage == 0, stage == plan.pp - 1
    parts = [groups.embedding] if first else []
    parts += [groups.layers[index] for chunk in job.layers_of_stage(stage) for index in chunk]
    if last:
        parts.append(groups.end if first else groups.end + groups.words)
    runs = tuple((group, sum(1 for _ in same)) for group, same in groupby(parts))
    if job.flat_states:
        whole = _held(runs, 1, 1, False)
        return replace(whole, owned=-(-whole.trained // plan.sharding))
    replicas = Mesh(plan).size_of("edp") if plan.sharding > 1 else 1
    return _held(runs, plan.sharding, replicas, plan.sharding_stage == 3 and plan.sharding > 1)


def _slices(job: Job) -> tuple[int, int, int]:
    return job.plan.mp, job.plan.ep, job.plan.emp


@lru_cache(maxsize=4096)
def _held(runs: tuple[tuple[_Group, int], ...], sharding: int, replicas: int, fetches: bool) -> Held:
    """Return the parameter counts of a rank that holds the layers in ``runs``.

    Args:
        runs: pairs (parameters of a layer, number of consecutive equal layers).
        sharding: the number of ranks that share the ownership of dense parameters.
        replicas: the number of ranks that share the ownership of experts' parameters.
        fetches: whether parameters are sharded and fetched before use (ZeRO stage 3).
    """

    def largest_share(of: Iterable[tuple[_Local, int]]) -> int:
        sizes: dict[bool, list[int]] = {False: [], True: []}
        for one, size in of:
            sizes[one.of_experts].append(size)
        return _largest_share(sizes[False], sharding) + _largest_share(sizes[True], replicas)

    held = [one for group, count in runs for _ in range(count) for one in group]
    sizes, trained = [one.size for one in held if not one.stored], [one for one in held if one.trains]
    ends = dict(zip(sizes, accumulate(sizes), strict=True))
    return Held(
        used=sum(sizes),
        resident=largest_share((one, one.size) for one in held if not one.stored) if fetches else sum(sizes),
        stored=largest_share((one, one.stored) for one in held)
        if fetches
        else sum(one.stored for one in held),
        trained=sum(one.size for one in trained),
        owned=largest_share((one, one.size) for one in trained),
        largest_layer=max((sum(one.size for one in group) for group, _ in runs), default=0),
        init_sizes=tuple((end, size) for size, end in ends.items()),
        num_tensors=len(held),
        whole=sum(one.size for one in trained if one.whole),
        partial=sum(one.size for one in trained if one.partial),
        experts=sum(one.size for one in trained if one.of_experts),
        owned_experts=largest_share((one, one.size) for one in trained if one.of_experts),
    )


def embedding_bytes(job: Job, stage: int) -> float:
    """Return the bytes of the word embedding's gradient; 0 if the embedding is not on ``stage`` or not
    trained."""
    # The backward pass completes this gradient last, and the next forward pass needs the embedding first, so
    # their messages cannot overlap with computation.
    words = _groups(job.model_key, *_slices(job)).embedding[0]
    return words.size * job.precision.gradient_bytes if stage == 0 and words.trains else 0.0


def largest_layer(job: Job) -> tuple[int, int]:
    """Return the numbers of elements and tensors of the largest block on one tensor-parallel rank."""
    return _largest_layer(job.model_key, *_slices(job))


@lru_cache(maxsize=256)
def _largest_layer(same: ModelKey, mp: int, ep: int, emp: int) -> tuple[int, int]:
    layers = set(_groups(same, mp, ep, emp).layers)
    return max((sum(one.size for one in group), len(group)) for group in layers)


@lru_cache(maxsize=256)
def _groups(same: ModelKey, mp: int, ep: int, emp: int) -> _Groups:
    degrees = {"mp": mp, "ep": ep, "emp": emp}
    groups: dict[str, list[_Local]] = {}
    words: list[_Local] = []
    for name, spec in parameter_specs(same.model, same.compress).items():
        if spec.kind == "quant":  # single numbers, whose memory and time are negligible
            continue
        part = name.split(".", 3)[2] if name.startswith(_LAYER) else name.partition(".")[0]
        of_experts = spec.view == EXPERTS
        whole = not of_experts and spec.placement("mp") == REPLICATE
        cut = [degrees[axis] for axis, placement in spec.value.items() if isinstance(placement, Shard)]
        size = math.prod(spec.shape) // math.prod(cut)
        stored = size * _BYTES[spec.dtype] if spec.dtype else 0
        local = _Local(size, stored, spec.trains, whole, whole and spec.sums("mp"), of_experts)
        groups.setdefault(part, []).append(local)
        if name.startswith("embedding.word_embeddings."):
            words.append(local)
    layers = [tuple(groups.get(str(index), ())) for index in range(same.model.num_layers)]
    equal: dict[_Group, _Group] = {}
    return _Groups(
        embedding=tuple(groups["embedding"]),
        layers=tuple(equal.setdefault(layer, layer) for layer in layers),
        end=tuple(one for part in ("decoder", "head", "score") for one in groups.get(part, ())),
        words=tuple(words) if model_spec(same.model).head.is_tied else (),
    )


def _largest_share(sizes: list[int], ranks: int) -> int:
    """Return the largest number of elements that one of ``ranks`` ranks owns. Parameters of the given
    ``sizes`` are assigned to the ranks as a whole."""
    ranks = max(1, min(ranks, len(sizes)))  # with more ranks than parameters, each owns at most one
    named = {str(number): size for number, size in enumerate(sizes)}
    load = [0] * ranks
    for name, rank in assign_owners(named, ranks).items():
        load[rank] += named[name]
    return max(load)
