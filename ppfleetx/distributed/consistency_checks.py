"""Check that all ranks use the same configuration, read the right data, hold equal copies of weights, and
compute finite numbers. ``Engine.checks`` selects the checks:

- ``cheap`` compares configurations at the start, batches at every step, and copies of weights at the start
  and before each checkpoint.
- ``full`` also compares copies of weights and of optimizer states at every step, and searches activations and
  gradients for non-finite numbers. It also checks that no two data-parallel replicas read the same sample,
  unless the data is allowed to repeat a sample within a step.
- ``off`` checks nothing.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ppfleetx.config.errors import UserError
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather

if TYPE_CHECKING:
    from paddle import Tensor, nn

MAX_NAMED = 4
"""Maximum number of names in an error message."""


class CheckFailedError(UserError):
    """Raised when ranks have different configurations, read the wrong batches, or hold unequal copies of
    weights."""


# -- configurations ---------------------------------------------------------------------------


def check_same_configuration(ctx: ParallelContext, values: Mapping[str, Any]) -> None:
    """Check that all ranks have the same configuration. ``values`` is this rank's configuration by dotted
    key. All ranks must call this. Raises CheckFailedError if two ranks differ."""
    texts = {key: repr(value) for key, value in values.items()}
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()
    digests = gather(ctx, digest)
    if len(set(digests)) == 1:
        return
    other = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
    everyone = gather(ctx, texts if ctx.rank in (0, other) else None)
    zero, one = everyone[0], everyone[other]
    keys = [key for key in sorted({*zero, *one}) if zero.get(key) != one.get(key)]
    listed = ", ".join(f"{key} ({zero.get(key)} and {one.get(key)})" for key in keys[:MAX_NAMED])
    raise CheckFailedError(f"ranks 0 and {other} run different configurations: {listed}")


# -- batches ----------------------------------------------------------------------------------


def batch_digest(micro_batches: Sequence[Mapping[str, np.ndarray]]) -> int:
    """Return a 31-bit digest of the sample ids and tokens that a rank reads for one step."""
    checksum = 0
    for batch in micro_batches:
        for name in ("sample_ids", "tokens"):
            if name in batch:
                checksum = zlib.crc32(np.ascontiguousarray(batch[name]), checksum)
    return checksum >> 1


def check_batches(ctx: ParallelContext, digests: Sequence[int], *, distinct: bool) -> None:
    """Check that the ranks of each data-parallel replica read the same batch. ``digests`` contains the
    :func:`batch_digest` of each rank, in rank order. With ``distinct``, also check that different replicas
    read different batches. Raises CheckFailedError if a check fails."""
    first_of: dict[int, int] = {}
    for rank, digest in enumerate(digests):
        data_rank = ctx.plan.data_rank(rank)
        reader = first_of.setdefault(data_rank, rank)
        if digest != digests[reader]:
            raise CheckFailedError(
                f"ranks {reader} and {rank} belong to the same data rank {data_rank} "
                "but read different batches"
            )
    readers: dict[int, int] = {}
    for data_rank, rank in first_of.items():
        other = readers.setdefault(digests[rank], rank)
        if distinct and other != rank:
            raise CheckFailedError(
                f"ranks {other} and {rank} are data ranks {ctx.plan.data_rank(other)} and {data_rank} "
                "but read the same batch"
            )


def check_samples(ctx: ParallelContext, sample_ids: Sequence[int]) -> None:
    """Check that no two data-parallel replicas read the same sample in a step. ``sample_ids`` are the samples
    of this rank; negative ids are ignored. All ranks must call this. Raises CheckFailedError if two replicas
    read the same sample."""
    of_rank = gather(ctx, [int(i) for i in sample_ids])
    seen: dict[int, int] = {}
    for rank, ids in enumerate(of_rank):
        for sample in ids:
            other = seen.setdefault(sample, rank)
            # Negative ids are padding.
            if sample >= 0 and ctx.plan.data_rank(other) != ctx.plan.data_rank(rank):
                raise CheckFailedError(
                    f"ranks {other} and {rank} belong to different data ranks but both read sample {sample}"
                )


# -- copies -----------------------------------------------------------------------------------

Held = tuple[str, "Tensor", Any]
"""A tensor to compare between ranks: (its name, the tensor, the ``info`` of the parameter that the tensor is
or belongs to)."""


def check_replicas(ctx: ParallelContext, tensors: Iterable[Held]) -> None:
    """Check that the copies of each tensor on different ranks are bitwise equal. Tensors are copies if they
    have the same name and the same offset in the unsharded tensor. All ranks must call this. Raises
    CheckFailedError if copies differ."""
    if ctx.world_size == 1:
        return
    # Copies can be on ranks that differ along dp, sharding, sep or mp. Copies of tied weights can also be on
    # different pipeline stages.
    mine = {f"{name} {list(info.offset)}": _checksum(tensor) for name, tensor, info in tensors}
    seen: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, held in enumerate(gather(ctx, mine)):
        for place, checksum in held.items():
            other, expected = seen.setdefault(place, (rank, checksum))
            if checksum != expected:
                differing.setdefault(place, (other, rank))
    if differing:
        named = [
            f"{place.split(' [')[0]} on ranks {a} and {b}"
            for place, (a, b) in list(differing.items())[:MAX_NAMED]
        ]
        raise CheckFailedError(
            f"copies that must be equal are not, {len(differing)} of {len(seen)} tensors: {', '.join(named)}"
        )


def _checksum(tensor: Tensor) -> str:
    """Return a checksum of the tensor's bytes."""
    from ppfleetx.distributed.host_device_copy import read

    in_place = tensor.place.is_cpu_place() and tensor.is_contiguous() and "bfloat16" not in str(tensor.dtype)
    array = np.from_dlpack(tensor.detach()) if in_place else np.ascontiguousarray(read(tensor))
    content = array.reshape(-1).view(np.uint8)
    words = content[: content.size // 8 * 8].view(np.uint64)
    rest = zlib.crc32(content[words.nbytes :])
    # XOR and sum of the 64-bit words: a CRC of the whole tensor would take ten times as long.
    return f"{np.bitwise_xor.reduce(words):x} {np.add.reduce(words):x} {rest:x}"


# -- numbers that are not finite --------------------------------------------------------------


@dataclass(frozen=True)
class NonFinitePlace:
    """The place where a non-finite number (NaN or infinity) first appeared on a rank.

    Attributes:
        in_forward: True if the number appeared in the output of a layer, False if it appeared in a gradient.
        index: the number of the layer in the model.
        layer: the layer's description in messages, such as ``layer 3``.
        parameter: for a gradient, the name of its parameter; for an output, the name of a non-finite
            parameter of the layer, or "" if all are finite.
        micro_batch: the number of the micro batch in the step, from 0; None if unknown.
    """

    in_forward: bool
    index: int
    layer: str
    parameter: str
    micro_batch: int | None

    def __str__(self) -> str:
        if not self.in_forward:
            return f"the gradient of {self.parameter}"
        cause = f", whose parameter {self.parameter} is not finite" if self.parameter else ""
        return f"the output of {self.layer}{cause}"


class NonFiniteSearch:
    """Context manager that searches for NaNs and infinities while a step runs, in each layer's output and
    each parameter's gradient. ``indexed_layers`` are pairs (index in the whole model, layer) of this rank."""

    def __init__(self, indexed_layers: Iterable[tuple[int, nn.Layer]]) -> None:
        self._indexed_layers = list(indexed_layers)
        self._hooks: list[Any] = []
        self.forward: NonFinitePlace | None = None
        self.backward: NonFinitePlace | None = None

    def __enter__(self) -> Self:
        self.forward = self.backward = None
        self._passes: Counter[Any] = Counter()  # by layer number or parameter name
        for index, layer in self._indexed_layers:
            self._hooks.append(layer.register_forward_post_hook(partial(self._look_at_output, index)))
            self._hooks += [
                parameter.register_hook(partial(self._look_at_gradient, index, parameter))
                for parameter in layer.parameters()
                if not parameter.stop_gradient
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def place(self) -> NonFinitePlace | None:
        return self.forward or self.backward

    def _look_at_output(self, index: int, layer: nn.Layer, _: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if not hasattr(out, "detach"):
            return  # DeferredLogits: the loss computes them later
        number = self._count(index)
        if self.forward is None and not _is_finite(out):
            bad = [p.info.name for p in layer.parameters() if p._is_initialized() and not _is_finite(p)]
            name = f"layer {index} ({type(layer).__name__})"
            self.forward = NonFinitePlace(True, index, name, bad[0] if bad else "", number)

    def _count(self, place: int | str) -> int:
        self._passes[place] += 1
        return self._passes[place] - 1

    def _look_at_gradient(self, index: int, parameter: Tensor, grad: Tensor | None) -> None:
        """Check whether the gradient of ``parameter`` is finite. If ``grad`` is None, the gradient is in
        ``parameter.main_grad``."""
        grad = parameter.main_grad if grad is None else grad
        name = parameter.info.name
        number = self._count(name)
        if self.backward is None and not _is_finite(grad):
            self.backward = NonFinitePlace(False, index, f"layer {index}", name, number)


def _is_finite(tensor: Tensor) -> bool:
    import paddle

    with paddle.no_grad():
        return bool(paddle.isfinite(tensor.detach().astype("float32")).all().item())


def first_place(ctx: ParallelContext, mine: NonFinitePlace | None) -> tuple[int, NonFinitePlace] | None:
    """Return where the first non-finite number of a step appeared, over all ranks, as (rank, NonFinitePlace):
    in the lowest layer with a non-finite output or, without such a layer, in the highest layer with a
    non-finite gradient. Returns None if all numbers are finite. ``mine`` is the result of this rank's search.
    All ranks must call this."""
    everyone = gather(ctx, None if mine is None else asdict(mine))
    found = [(rank, NonFinitePlace(**place)) for rank, place in enumerate(everyone) if place is not None]
    if not found:
        return None
    # The lowest layer with a non-finite output or, if there is none, the highest with a non-finite gradient.
    return min(found, key=lambda at: (not at[1].in_forward, at[1].index * (1 if at[1].in_forward else -1)))
