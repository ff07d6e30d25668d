"""Auxiliary losses of layers, such as a router's, in addition to the loss of the task.

    hidden = with_aux_loss(hidden, AuxLoss("z_loss", logits.logsumexp(-1).square(), weight=1e-3))

returns ``hidden`` with unchanged values. The backward pass through the result also backpropagates the
auxiliary loss. A layer of any pipeline stage can call the function. The losses with the same name are added
up over layers, micro batches and ranks, and contribute this term to the loss of a step:

    weight x (sum of the values over the step) / divisor

The metric ``name`` is this term without the weight, as a mean over layers instead of a sum. The logged
``loss`` contains only the loss of the task.

Shape letters: s positions of the hidden states on this rank, b rows of the micro batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import paddle
from paddle import nn
from paddle.autograd import PyLayer

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.host_device_copy import upload
from ppfleetx.nn.chunked_loss import ChunkedHead
from ppfleetx.nn.loss_output import Sum
from ppfleetx.nn.recompute import is_recomputing

if TYPE_CHECKING:
    from ppfleetx.nn.stage import LayerFactory

Divisor = Literal["tokens", "sequences", "step"]
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class AuxLoss:
    """A loss that a layer computes for one micro batch.

    Attributes:
        name: name of the metric, declared by the architecture or the task.
        value: a loss for each token ``[s, b]``, for each sequence ``[b]``, or one scalar.
        divisor: what the sum over a step is divided by. ``tokens``: the number of valid tokens, for a value
            ``[s, b]``. ``sequences``: the number of valid sequences, for a value ``[b]``. ``step``: 1, for a
            scalar. Values of invalid tokens and sequences are ignored.
        same_on: axes (``mp``, ``sep``) whose ranks hold the same value. Along other axes, the values are
            summed. None: the axes whose ranks hold the same hidden states.
    """

    name: str
    value: paddle.Tensor
    weight: float
    divisor: Divisor = "tokens"
    same_on: tuple[str, ...] | None = None


def with_aux_loss(hidden: paddle.Tensor, aux: AuxLoss) -> paddle.Tensor:
    """Attach the loss ``aux`` to ``hidden``, and return ``hidden`` with unchanged values. The backward pass
    through the result also backpropagates the loss. Outside of :meth:`AuxLossScope.step` (generation, a
    teacher model), no loss is attached."""
    place = _PLACE.get()
    return hidden if place is None else place.scope.attach(hidden, aux, place.micro_batch)


def local_loss_mask() -> paddle.Tensor | None:
    """Return the current micro batch's loss mask ``[s, b]`` at this rank's positions; None outside of a
    step."""
    place = _PLACE.get()
    return None if place is None else place.scope.weights_of("tokens", place.micro_batch)


class AuxLossScope:
    """Attaches auxiliary losses during a step. It tracks which micro batch each layer is processing, because
    a loss needs the loss mask of its micro batch.

    Args:
        record: function to call with the name and the metric of each loss. It is not called again when the
            backward pass recomputes the loss.
    """

    def __init__(
        self, factory: LayerFactory, ctx: ParallelContext, record: Callable[[str, Sum], None]
    ) -> None:
        self._factory, self._ctx, self._record = factory, ctx, record
        self._micro_batches: Sequence[Arrays] = ()
        self._divisors: Mapping[str, float] | None = None
        self._loss_scale = 1.0
        self._passes: dict[nn.Layer, int] = {}
        self._weights: dict[tuple[int, Divisor], paddle.Tensor] = {}

    def watch(self, layers: Iterable[nn.Layer]) -> None:
        """Register hooks on ``layers``, the layers that can attach auxiliary losses. Each layer must run once
        per micro batch, in the order of the micro batches."""
        for layer in layers:
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_post_hook(lambda *_: _PLACE.set(None) and None)

    @contextmanager
    def step(
        self,
        micro_batches: Sequence[Arrays],
        divisors: Mapping[str, float] | None = None,
        loss_scale: float = 1.0,
    ) -> Iterator[None]:
        """Context manager for one optimizer step over ``micro_batches``, in which layers can attach losses.

        Args:
            divisors: result of :func:`divisors_of`; None: losses get no gradient.
            loss_scale: factor by which the gradients of the losses are multiplied.
        """
        self._micro_batches, self._divisors, self._loss_scale = micro_batches, divisors, loss_scale
        self._passes = {}
        try:
            yield
        finally:
            self._micro_batches, self._weights = (), {}
            _PLACE.set(None)  # still set if a forward pass has failed

    def attach(self, hidden: paddle.Tensor, aux: AuxLoss, micro_batch: int) -> paddle.Tensor:
        value = aux.value.astype("float32")
        if aux.divisor != "step":
            value = value * self.weights_of(aux.divisor, micro_batch)
        value = value.sum()
        if not is_recomputing():
            same_on = self._factory.hidden_same_on if aux.same_on is None else aux.same_on
            count = self._count(aux.divisor, micro_batch) / self._num_parts(same_on)
            self._record(aux.name, Sum(value.detach(), count, same_on))
        if self._divisors is None or value.stop_gradient or not paddle.is_grad_enabled():
            return hidden
        return _Attached.apply(hidden, value, aux.weight * self._loss_scale / self._divisors[aux.divisor])

    def _enter(self, layer: nn.Layer, inputs: tuple[Any, ...]) -> None:
        if not self._micro_batches or (isinstance(layer, ChunkedHead) and layer.defers(inputs)):
            return
        micro_batch = self._passes.get(layer, 0)
        self._passes[layer] = micro_batch + 1
        if micro_batch < len(self._micro_batches):  # further runs of the layer attach no loss
            _PLACE.set(_Place(self, micro_batch))

    def weights_of(self, of: Divisor, micro_batch: int) -> paddle.Tensor:
        """Return the mask of the valid tokens or sequences of a micro batch. If ``of`` is ``tokens``, this is
        the loss mask ``[s, b]`` at this rank's positions. Otherwise it is ``[b]``: 1 for rows with any valid
        token, else 0."""
        if (micro_batch, of) not in self._weights:
            weights = upload(_weights(self._micro_batches[micro_batch], of).astype(np.float32))
            if of == "tokens":
                weights = self._factory.local_positions(weights).transpose([1, 0])
                weights = self._factory.scatter_positions(weights)
            self._weights[micro_batch, of] = weights
        return self._weights[micro_batch, of]

    def _count(self, of: Divisor, micro_batch: int) -> float:
        """Return what one micro batch adds to the count of a metric. For ``tokens`` and ``sequences``, this
        is the number of valid tokens or sequences. For ``step``, it is 1 / (number of the step's micro
        batches on all data-parallel ranks), so that the counts of a step add up to 1."""
        if of == "step":
            return 1.0 / (len(self._micro_batches) * self._ctx.data_size)
        return float(_weights(self._micro_batches[micro_batch], of).sum())

    def _num_parts(self, same_on: Sequence[str]) -> int:
        """Return the number of parts of a loss that the ranks along ``mp`` and ``sep`` hold. Ranks along the
        axes ``same_on`` hold the same part, which counts once."""
        return math.prod(self._ctx.size_of(axis) for axis in ("sep", "mp") if axis not in same_on)


_COUNTED: tuple[Divisor, ...] = ("tokens", "sequences")


def counts_of(micro_batches: Sequence[Arrays]) -> list[float]:
    return [sum(float(_weights(batch, of).sum()) for batch in micro_batches) for of in _COUNTED]


def divisors_of(counts: Sequence[float]) -> Mapping[str, float]:
    """Return the divisor for each kind of auxiliary loss (``step``, ``tokens``, ``sequences``). ``counts`` is
    the sum of :func:`counts_of` over all ranks."""
    return {"step": 1.0, **{of: max(count, 1.0) for of, count in zip(_COUNTED, counts, strict=True)}}


@dataclass(frozen=True)
class _Place:
    scope: AuxLossScope
    micro_batch: int


# A context variable, because recomputation restores the context variables of the layer's first run
# (nn/recompute.py).
_PLACE: ContextVar[_Place | None] = ContextVar("place", default=None)


def _weights(batch: Arrays, of: Divisor) -> np.ndarray:
    """Return the mask of the valid tokens or sequences of ``batch``. If ``of`` is ``tokens``, this is the
    loss mask ``[b, s]``. Otherwise it is ``[b]``: True for rows with any valid token."""
    mask = batch.get("loss_mask")
    if mask is None:  # a task without a loss mask
        mask = np.ones(batch["tokens"].shape, np.float32)
    if of == "tokens":
        return mask if mask.ndim == 2 else np.broadcast_to(mask[:, None], batch["tokens"].shape)
    return (mask != 0).any(axis=1) if mask.ndim == 2 else mask != 0


class _Attached(PyLayer):
    """Autograd function that returns its first argument, the hidden states. Its second argument is a loss,
    which gets a constant gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: paddle.Tensor, value: paddle.Tensor, gradient: float) -> paddle.Tensor:
        ctx.gradient, ctx.gives_hidden = gradient, not hidden.stop_gradient
        return hidden.view(hidden.shape)  # returning the tensor itself would count as an in-place change

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, paddle.Tensor]:
        return upstream if ctx.gives_hidden else None, paddle.full([], ctx.gradient, "float32")
