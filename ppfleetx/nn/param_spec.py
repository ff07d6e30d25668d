"""Declarations of parameters. From a declaration and a device mesh, functions derive each rank's slice, the
gradient reductions, the owner, and the ranks that write checkpoints. This module does not import Paddle.

A *view* arranges the ranks as a grid with named axes. Dense parameters use one view, and parameters of
experts use another.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ppfleetx.config.mesh import SUM_ORDER, Mesh, RankGrid, grid_of
from ppfleetx.nn.init import Constant, Init

Axes = tuple[str, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """Placement along one axis of the device mesh: each rank holds an equal slice of dimension ``dim``."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Placement along one axis of the device mesh: each rank holds the whole tensor."""


@dataclass(frozen=True)
class Partial:
    """Placement along one axis of the device mesh: each rank holds one term of a sum over the ranks."""


Placement = Shard | Replicate | Partial
REPLICATE, PARTIAL = Replicate(), Partial()


@dataclass(frozen=True)
class Part:
    """One matrix inside a fused parameter, such as the queries in a fused projection, or one head of a norm's
    gain. Dimension ``dim`` is divided into periods of ``period`` indices. In each period, ``width`` indices
    from ``offset`` on belong to the part."""

    name: str
    dim: int
    period: int
    offset: int
    width: int


@dataclass(frozen=True)
class ParamSpec:
    """The declaration of one parameter of the whole model.

    Attributes:
        shape: shape of the whole parameter.
        kind: ``matrix``, ``bias``, ``norm``, ``word_embedding``, ``position_embedding``, ``head``,
            ``router``, ``router_bias``, ``router_load``, ``lora``, ``quant``.
        value: placement of the parameter's value along each axis. Along axes that are not listed, every rank
            has the whole value.
        grad: placement of the gradient along each axis after a backward pass. Along axes that are not listed,
            the gradient is placed like the value.
        parts: the matrices or heads that the parameter consists of.
        tie: key of the tie (:class:`~ppfleetx.nn.stage.Tie`) if several stages share the parameter; else
            None.
        dtype: dtype in which the parameter is stored, if it differs from the model's.
        name: canonical name, e.g. ``decoder.layers.3.attention.qkv.weight``; empty until the layer is part of
            a stage.
    """

    shape: Shape
    init: Init = field(default_factory=Constant)
    kind: str = "matrix"
    value: Mapping[str, Placement] = field(default_factory=dict)
    grad: Mapping[str, Placement] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    tie: str | None = None
    trains: bool = True
    dtype: str | None = None
    name: str = ""

    @property
    def view(self) -> RankGrid:
        """The grid of ranks on which the parameter is placed. Dense parameters and parameters of experts have
        different grids."""
        return grid_of({*self.value, *self.grad})

    def placement(self, axis: str) -> Placement:
        """Return the placement of the parameter's value along ``axis``."""
        return self.value.get(axis, REPLICATE)

    def sums(self, axis: str) -> bool:
        """Return whether the gradient must be summed over the ranks along ``axis``."""
        return self.grad.get(axis) == PARTIAL


def dense(
    shape: Shape,
    init: Init,
    kind: str,
    *,
    mp: Placement = REPLICATE,
    partial: bool = False,
    parts: tuple[Part, ...] = (),
) -> ParamSpec:
    """Declare a parameter that does not belong to an expert. Its gradient is a partial sum along dp, sharding
    and sep.

    Args:
        mp: placement of the value along mp.
        partial: whether the gradient is also a partial sum along mp.
    """
    grad: dict[str, Placement] = dict.fromkeys(("dp", "sharding", "sep"), PARTIAL)
    if partial:
        grad["mp"] = PARTIAL
    return ParamSpec(shape, init, kind, {"mp": mp}, grad, parts)


@dataclass(frozen=True)
class ParamInfo:
    """One rank's slice of a parameter, as computed by :func:`placed`. ``offset`` is the first global index of
    the slice in each dimension."""

    name: str
    global_shape: Shape
    offset: Shape
    local_shape: Shape
    init: Init
    kind: str


def placed(spec: ParamSpec, mesh: Mesh, rank: int) -> ParamInfo:
    """Return the slice of a parameter that ``rank`` holds.

    Raises:
        ValueError: a dimension cannot be divided evenly.
    """
    at, count, index = mesh.coordinates(rank), [1] * len(spec.shape), [0] * len(spec.shape)
    for axis in spec.view.axes:  # the order matters if several axes shard the same dimension
        placement = spec.placement(axis)
        if isinstance(placement, Shard):
            size = mesh.size_of(axis)
            count[placement.dim] *= size
            index[placement.dim] = index[placement.dim] * size + at[axis]
    if any(size % parts for size, parts in zip(spec.shape, count, strict=True)):
        raise ValueError(f"{spec.name or spec.kind} of shape {list(spec.shape)} does not divide into {count}")
    local = tuple(size // parts for size, parts in zip(spec.shape, count, strict=True))
    offset = tuple(size * number for size, number in zip(local, index, strict=True))
    return ParamInfo(spec.name, spec.shape, offset, local, spec.init, spec.kind)


def owner_axes(spec: ParamSpec, mesh: Mesh) -> Axes:
    """Return the axis along which ZeRO divides the ownership of parameters, as ``(axis,)``; ``()`` if every
    rank owns all of its parameters."""
    axis = spec.view.owners
    return (axis,) if mesh.plan.sharding > 1 and mesh.size_of(axis) > 1 else ()


def assign_owners(sizes: Mapping[str, int], num_ranks: int, first: Iterable[str] = ()) -> dict[str, int]:
    """Choose an owner for each parameter. Return the number of the owning rank by parameter name. All ranks
    own about the same number of elements.

    Args:
        sizes: number of elements of each parameter, by name.
        first: names of parameters that rank 0 must own.
    """
    owners = dict.fromkeys((name for name in first if name in sizes), 0)
    loads = [(sum(sizes[name] for name in owners), 0), *((0, rank) for rank in range(1, num_ranks))]
    heapq.heapify(loads)
    # From the largest to the smallest, each parameter goes to the rank with the fewest elements so far.
    for name, size in sorted(sizes.items(), key=lambda item: item[1], reverse=True):
        if name not in owners:
            load, owners[name] = loads[0]
            heapq.heapreplace(loads, (load + size, owners[name]))
    return owners


def gradient_sums(spec: ParamSpec, mesh: Mesh) -> tuple[Axes, ...]:
    """Return the process groups over which a parameter's gradient is summed, in the order of the sums. Each
    group is given by its axes. Under sharding, the reduction to the parameter's owner comes first and is not
    included."""
    # The order affects the last bits. Replicas are summed in one group, because two successive sums would add
    # the numbers in different orders on different ranks. Tied copies (pp) come last, because the sum of two
    # numbers does not depend on the order.
    done = owner_axes(spec, mesh)
    rounds = ((spec.view.tensor,), spec.view.replicas, ("pp",))
    left = [tuple(a for a in axes if _sums_over(spec, a, mesh) and a not in done) for axes in rounds]
    return tuple(axes for axes in left if axes)


def _sums_over(spec: ParamSpec, axis: str, mesh: Mesh) -> bool:
    return spec.sums(axis) and mesh.size_of(axis) > 1


def kept_equal_over(spec: ParamSpec, mesh: Mesh) -> Axes:
    """Return the tensor-parallel axis, as ``(axis,)``, if its ranks hold replicas of the parameter. The
    gradients of such replicas must be bitwise equal. Return ``()`` if tensor parallelism slices the parameter
    or is off."""
    axis = spec.view.tensor
    return (axis,) if mesh.size_of(axis) > 1 and spec.placement(axis) == REPLICATE else ()


def may_lack_gradient(spec: ParamSpec) -> bool:
    """Return whether the parameter can have no gradient after a backward pass, such as an expert that
    received no tokens."""
    return spec.trains and "ep" in spec.view.axes


def norm_axes(view: RankGrid, mesh: Mesh) -> Axes:
    """Return the axes of ``view`` over which squared gradients are summed to get the gradient norm."""
    # These are the axes whose ranks have different gradients, or different parts of one. With ZeRO, only the
    # owner has the gradient.
    owners = (view.owners,) if mesh.plan.sharding > 1 else ()
    order = (view.tensor, *(axis for axis in view.axes if axis != view.tensor))
    return tuple(axis for axis in order if axis in owners or not _is_replica(axis, view))


def _is_replica(axis: str, view: RankGrid) -> bool:
    return axis in view.replicas and axis != "ep"


def counts_in_norm(spec: ParamSpec, mesh: Mesh, rank: int) -> bool:
    """Return whether ``rank`` includes the gradient of its slice in the gradient norm. Of the ranks along
    :func:`norm_axes` that hold the same slice, only the first includes it. The caller must exclude ranks that
    do not own the parameter, and tied copies in later pipeline stages."""
    return _is_first_copy(spec, mesh, rank, norm_axes(spec.view, mesh))


def writes_to_checkpoint(spec: ParamSpec, mesh: Mesh, rank: int) -> bool:
    """Return whether ``rank`` writes its slice of the parameter into a checkpoint. Of the ranks that hold the
    same slice, only the first writes it. The caller must exclude ranks that do not own the parameter, and
    tied copies in later pipeline stages."""
    return _is_first_copy(spec, mesh, rank, spec.view.axes)


def _is_first_copy(spec: ParamSpec, mesh: Mesh, rank: int, axes: Axes) -> bool:
    """Return whether ``rank`` has coordinate 0 along each of ``axes`` whose ranks hold replicas of the
    parameter. The pipeline axis and the owner axis are ignored."""
    at, without = mesh.coordinates(rank), {"pp", *owner_axes(spec, mesh)}
    return all(at[a] == 0 for a in axes if a not in without and spec.placement(a) == REPLICATE)


def groups_needed(specs: Iterable[ParamSpec], mesh: Mesh) -> tuple[Axes, ...]:
    """Return the process groups that parameters with these declarations need. All ranks must create the
    groups in this order. Each group is given by its axes."""
    needed: set[Axes] = set()
    for spec in specs:
        needed |= {*gradient_sums(spec, mesh), owner_axes(spec, mesh), kept_equal_over(spec, mesh)}
        needed |= {(axis,) for axis in norm_axes(spec.view, mesh)}
    return tuple(sorted(needed - {()}))


def in_order(sums: Iterable[Axes]) -> list[Axes]:
    """Return the process groups ``sums`` without duplicates, in the order in which gradients are summed over
    them. Each group is given by its axes."""
    return sorted(set(sums), key=lambda axes: (SUM_ORDER.index(axes[0]), axes))
