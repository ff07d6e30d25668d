"""Replace the parts of Paddle that do not work with the CPU process groups. ``TABLE`` lists each replaced
attribute of Paddle 3.3.1 with the reason. Importing this module replaces nothing; :func:`apply_patches`
does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.autograd import PyLayer


def _process_group(ring_id: int) -> Any:
    return paddle.distributed.get_group(ring_id).process_group


class _Identity(PyLayer):
    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, ring_id: int) -> paddle.Tensor:
        ctx.ring_id = ring_id
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        total = grad.clone()
        _process_group(ctx.ring_id).all_reduce(total)
        return total


class _SoftmaxCrossEntropy(PyLayer):
    """Cross-entropy of vocabulary-parallel logits: each rank of the group holds a range of classes, in rank
    order. Returns (softmax, loss). The loss of logits ``[..., classes]`` has shape ``[..., 1]``, and is zero
    where the label is ``ignore_index``."""

    @staticmethod
    def forward(
        ctx: Any, logits: paddle.Tensor, label: paddle.Tensor, ignore_index: int, ring_id: int, rank: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        group = _process_group(ring_id)
        wide = logits if logits.dtype == paddle.float64 else logits.astype("float32")
        local = label.astype("int64") - rank * logits.shape[-1]
        peak = wide.max(axis=-1, keepdim=True)
        group.all_reduce(peak, 1)
        shifted = wide - peak
        exponent = shifted.exp()
        here = ((local >= 0) & (local < logits.shape[-1])).astype(wide.dtype)
        index = local.clip(0, logits.shape[-1] - 1)
        target = paddle.take_along_axis(shifted, index, axis=-1) * here
        sums = paddle.stack([exponent.sum(axis=-1, keepdim=True), target])
        group.all_reduce(sums)
        counted = (label != ignore_index).astype(wide.dtype)
        loss = (sums[0].log() - sums[1]) * counted
        softmax = exponent / sums[0]
        ctx.save_for_backward(softmax, index, here * counted, counted)
        ctx.dtype = logits.dtype
        softmax_out = softmax.astype(logits.dtype)
        ctx.mark_non_differentiable(softmax_out)
        return softmax_out, loss.astype(logits.dtype)

    @staticmethod
    def backward(ctx: Any, _: paddle.Tensor, grad: paddle.Tensor) -> paddle.Tensor:
        softmax, index, chosen, counted = ctx.saved_tensor()
        grad = grad.astype(softmax.dtype)
        out = softmax * (grad * counted)
        out = paddle.put_along_axis(out, index, -grad * chosen, axis=-1, reduce="add")
        return out.astype(ctx.dtype)


def _c_identity(tensor: paddle.Tensor, ring_id: int = 0, *_: Any) -> paddle.Tensor:
    return _Identity.apply(tensor, ring_id)


def _c_softmax_with_cross_entropy(
    logits: paddle.Tensor, label: paddle.Tensor, ignore_index: int, ring_id: int, rank: int, nranks: int
) -> tuple[paddle.Tensor, paddle.Tensor]:
    return _SoftmaxCrossEntropy.apply(logits, label, ignore_index, ring_id, rank)


def _make_c_embedding(original: Callable[..., paddle.Tensor]) -> Callable[..., paddle.Tensor]:
    def c_embedding(
        table: paddle.Tensor, index: paddle.Tensor, start: int = 0, vocab_size: int = -1
    ) -> paddle.Tensor:
        if table.dtype in (paddle.float16, paddle.bfloat16):
            return original(table.astype("float32"), index, start, vocab_size).astype(table.dtype)
        return original(table, index, start, vocab_size)

    return c_embedding


@dataclass(frozen=True)
class Replacement:
    """One attribute of Paddle to replace. ``make`` must return the replacement. Its argument is the original
    attribute, or None if Paddle has no such attribute."""

    owner: str  # import path of the module, plus ":Class" for a class attribute
    name: str
    reason: str
    make: Callable[[Any], Any]

    @property
    def target(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


_applied: set[str] = set()
_create_process_group: Callable[[int, int, int], Any] | None = None


def apply_patches(create_process_group: Callable[[int, int, int], Any]) -> None:
    """Replace everything in ``TABLE`` that is not replaced yet. Paddle then creates CPU process groups by
    calling ``create_process_group(rank, size, group_id)``."""
    global _create_process_group
    _create_process_group = create_process_group
    for entry in TABLE:
        if entry.target not in _applied:
            owner = resolve_owner(entry)
            setattr(owner, entry.name, entry.make(getattr(owner, entry.name, None)))
            _applied.add(entry.target)


def resolve_owner(entry: Replacement) -> Any:
    path, _, class_name = entry.owner.partition(":")
    module = importlib.import_module(path)
    return getattr(module, class_name) if class_name else module


# -- start-up ---------------------------------------------------------------------------------


def _process_group_factory(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_process_group(
        backend: str, store: Any, rank: int, world_size: int, *args: Any, group_id: int = 0, **kwargs: Any
    ) -> Any:
        if backend != "gloo":
            return original(backend, store, rank, world_size, *args, group_id=group_id, **kwargs)
        return _create_process_group(rank, world_size, group_id)

    return new_process_group


_NO_KERNEL = "the CPU kernel only throws"

# tests/distributed/cpu/test_patches.py checks that each reason holds in unmodified Paddle. If a check fails,
# Paddle has been fixed, and the entry can be removed.
TABLE: tuple[Replacement, ...] = (
    Replacement(
        "paddle.distributed.collective",
        "_new_process_group_impl",
        "ProcessGroupGloo lacks reduce_scatter, all_to_all and every *_on_calc_stream",
        _process_group_factory,
    ),
    Replacement(
        "paddle.distributed.parallel",
        "_new_process_group_impl",
        "the same function: this module imported it by name",
        _process_group_factory,
    ),
    Replacement(
        "paddle.base.core",
        "create_or_get_global_tcp_store",
        "waits in C++ for ranks that do not come, for 900 seconds, and its error names nobody",
        lambda _: lambda: None,
    ),
    Replacement(
        "paddle.distributed.parallel:ParallelEnv",
        "_device_id",
        "never set on the CPU, yet read by pipeline and recompute",
        lambda _: 0,
    ),
    Replacement("paddle._C_ops", "c_identity", _NO_KERNEL, lambda _: _c_identity),
    Replacement(
        "paddle._C_ops",
        "c_softmax_with_cross_entropy",
        _NO_KERNEL,
        lambda _: _c_softmax_with_cross_entropy,
    ),
    Replacement(
        "paddle._C_ops",
        "c_embedding",
        "its backward corrupts the heap for float16 and is missing for bfloat16; float32 stays Paddle's",
        _make_c_embedding,
    ),
)
