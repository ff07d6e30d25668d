"""Losses that arise inside the model, such as a router's, in addition to the loss of the task.

    hidden = with_aux_loss(hidden, AuxLoss("z_loss", logits.logsumexp(-1).square(), weight=1e-3))

returns ``hidden``. In the backward pass the loss gets its gradient at this point, so nothing has to be passed
to the end of the model. This works in any layer of any pipeline stage. Layers may attach several losses, and
losses with the same name add up. All layers that attach ``name`` together add this to the loss of a step:

    weight x (sum of the values over the step) / divisor

The divisor belongs to the whole step and is known before its first forward pass. So the loss does not depend
on the plan, nor on micro batches, recomputation or loss scaling. The metric ``name`` is the mean of the
values over the layers and the tokens that count, without the weight. The logged ``loss`` is only the loss of
the task.

Shape letters: s positions of the hidden states that this rank has, b rows of the micro batch.
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
from ppfleetx.distributed.transfer import upload
from ppfleetx.nn.chunked_loss import PieceHead
from ppfleetx.nn.loss_output import Sum
from ppfleetx.nn.recompute import is_recomputing

if TYPE_CHECKING:
    from ppfleetx.nn.stage import LayerFactory

Divisor = Literal["tokens", "sequences", "step"]
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class AuxLoss:
    """A loss of one micro batch that arises in a layer.

    Attributes:
        name: name of the metric; the architecture or the task declares it.
        value: ``[s, b]`` for ``tokens``, a number for each position of the hidden states here; ``[b]`` for
            ``sequences``; a scalar for ``step``.
        weight: weight of the loss.
        divisor: ``tokens`` or ``sequences``: the number of tokens or sequences that count in the loss of the
            step (others have no effect); ``step``: 1, so that values of all micro batches and ranks add up.
        same_on: axes whose ranks hold the same value, rather than a share of it. None: the axes whose ranks
            hold the same hidden states. If the layer has summed a value over ranks into whole sequences, it
            is the same on ``("mp", "sep")``.
    """

    name: str
    value: paddle.Tensor
    weight: float
    divisor: Divisor = "tokens"
    same_on: tuple[str, ...] | None = None


def with_aux_loss(hidden: paddle.Tensor, aux: AuxLoss) -> paddle.Tensor:
    """Return ``hidden`` unchanged; its backward pass also starts the gradient of ``aux``.

    Outside of a step, in generation or in a teacher, no loss is attached.
    """
    place = _PLACE.get()
    return hidden if place is None else place.scope.attach(hidden, aux, place.micro_batch)


def counted_positions() -> paddle.Tensor | None:
    """A mask ``[s, b]`` of this rank's hidden states: 1 where the position counts in the loss, else 0.

    None outside of a step.
    """
    place = _PLACE.get()
    return None if place is None else place.scope.weights_of("tokens", place.micro_batch)


class StepScope:
    """Tracks the step and the micro batch for every layer that runs. ``record`` is called with the metric of
    each loss, once, however often its layer runs."""

    def __init__(
        self, factory: LayerFactory, ctx: ParallelContext, record: Callable[[str, Sum], None]
    ) -> None:
        self._factory, self._ctx, self._record = factory, ctx, record
        self._micro_batches: Sequence[Arrays] = ()
        self._divisors: Mapping[str, float] | None = None
        self._loss_scale = 1.0
        self._passes: dict[nn.Layer, int] = {}
        self._weights: dict[tuple[int, Divisor], paddle.Tensor] = {}

    def watch(self, stages: Iterable[nn.Layer]) -> None:
        """Register the layers to track. Each layer runs once per micro batch, in order."""
        for layer in stages:
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_post_hook(lambda *_: _PLACE.set(None) and None)

    @contextmanager
    def step(
        self,
        micro_batches: Sequence[Arrays],
        divisors: Mapping[str, float] | None = None,
        loss_scale: float = 1.0,
    ) -> Iterator[None]:
        """Context manager for one step over these micro batches. Further runs of a layer attach no loss.

        Args:
            divisors: the divisors of the losses; None: losses get no gradient.
            loss_scale: factor of all gradients.
        """
        self._micro_batches, self._divisors, self._loss_scale = micro_batches, divisors, loss_scale
        self._passes = {}
        try:
            yield
        finally:
            self._micro_batches, self._weights = (), {}
            _PLACE.set(None)  # of a layer whose forward pass has failed

    def attach(self, hidden: paddle.Tensor, aux: AuxLoss, micro_batch: int) -> paddle.Tensor:
        value = aux.value.astype("float32")
        if aux.divisor != "step":
            value = value * self.weights_of(aux.divisor, micro_batch)
        value = value.sum()
        if not is_recomputing():
            same_on = self._factory.hidden_same_on if aux.same_on is None else aux.same_on
            count = self._count(aux.divisor, micro_batch) / self._num_shares(same_on)
            self._record(aux.name, Sum(value.detach(), count, same_on))
        if self._divisors is None or value.stop_gradient or not paddle.is_grad_enabled():
            return hidden
        return _Attached.apply(hidden, value, aux.weight * self._loss_scale / self._divisors[aux.divisor])

    def _enter(self, layer: nn.Layer, inputs: tuple[Any, ...]) -> None:
        if not self._micro_batches or (isinstance(layer, PieceHead) and layer.defers(inputs)):
            return
        micro_batch = self._passes.get(layer, 0)
        self._passes[layer] = micro_batch + 1
        if micro_batch < len(self._micro_batches):
            _PLACE.set(_Place(self, micro_batch))

    def weights_of(self, of: Divisor, micro_batch: int) -> paddle.Tensor:
        """1 for each position ``[s, b]`` or row ``[b]`` that counts, 0 for the others."""
        if (micro_batch, of) not in self._weights:
            weights = upload(_weights(self._micro_batches[micro_batch], of).astype(np.float32))
            if of == "tokens":
                weights = self._factory.local_positions(weights).transpose([1, 0])
                weights = self._factory.enter_trunk(weights)
            self._weights[micro_batch, of] = weights
        return self._weights[micro_batch, of]

    def _count(self, of: Divisor, micro_batch: int) -> float:
        """The divisor of a metric: the count of the whole step, so that micro batches and replicas average
        correctly."""
        if of == "step":
            return 1.0 / (len(self._micro_batches) * self._ctx.data_size)
        return float(_weights(self._micro_batches[micro_batch], of).sum())

    def _num_shares(self, same_on: Sequence[str]) -> int:
        """The number of ranks that share one micro batch and whose values are summed."""
        return math.prod(self._ctx.size_of(axis) for axis in ("sep", "mp") if axis not in same_on)


_COUNTED: tuple[Divisor, ...] = ("tokens", "sequences")


def counts_of(micro_batches: Sequence[Arrays]) -> list[float]:
    return [sum(float(_weights(batch, of).sum()) for batch in micro_batches) for of in _COUNTED]


def divisors_of(counts: Sequence[float]) -> Mapping[str, float]:
    """Turn the sums of :func:`counts_of` over all ranks into the divisors of a step."""
    return {"step": 1.0, **{of: max(count, 1.0) for of, count in zip(_COUNTED, counts, strict=True)}}


@dataclass(frozen=True)
class _Place:
    scope: StepScope
    micro_batch: int


# A context variable, because recomputation takes a layer back to where it ran first (nn/recompute.py).
_PLACE: ContextVar[_Place | None] = ContextVar("place", default=None)


def _weights(batch: Arrays, of: Divisor) -> np.ndarray:
    """Float weights of ``[b, s]`` tokens, or of ``[b]`` rows for a classifier, whose mask has one entry
    per row."""
    mask = batch.get("loss_mask")
    if mask is None:  # for a task that counts in another way
        mask = np.ones(batch["tokens"].shape, np.float32)
    if of == "tokens":
        return mask if mask.ndim == 2 else np.broadcast_to(mask[:, None], batch["tokens"].shape)
    return (mask != 0).any(axis=1) if mask.ndim == 2 else mask != 0


class _Attached(PyLayer):
    """Pass the first tensor through; in the backward pass, give the second a constant gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: paddle.Tensor, value: paddle.Tensor, gradient: float) -> paddle.Tensor:
        ctx.gradient, ctx.gives_hidden = gradient, not hidden.stop_gradient
        return hidden.view(hidden.shape)  # the tensor itself would be one that is changed in place

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, paddle.Tensor]:
        return upstream if ctx.gives_hidden else None, paddle.full([], ctx.gradient, "float32")
