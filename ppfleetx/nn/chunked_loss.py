"""Chunked loss: head and loss are computed in chunks ("pieces") of positions, so that the logits never exist
as a whole (Hsu et al., Liger Kernel, 2024, section 3.2).

Shape letters: s positions, b rows, h width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from ppfleetx.nn.attention_kernels import softcapped
from ppfleetx.nn.matmul import Matmul, in_dtype

OfPiece = Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor], Any]
"""A function of one chunk: its logits ``[length, b, columns]``, labels ``[b, length]`` and mask
``[b, length]``."""


@dataclass(frozen=True)
class ChunkTarget:
    """The inputs with which the head computes a loss instead of logits.

    Attributes:
        labels, mask: ``[b, s]`` at this rank's positions.
        function: function that is called for each chunk; it returns, for example, the chunk's loss.
    """

    labels: paddle.Tensor
    mask: paddle.Tensor
    function: OfPiece


class DeferredLogits:
    """A placeholder for logits that are computed chunk by chunk when the loss needs them.

    Args:
        hidden: ``[s, b, h]``, the input of the head.
    """

    def __init__(self, head: ChunkedHead, hidden: paddle.Tensor) -> None:
        self.head, self.hidden = head, hidden

    def loss(self, labels: paddle.Tensor, mask: paddle.Tensor, function: OfPiece) -> paddle.Tensor:
        """Return the differentiable sum of ``function(logits, labels, mask)`` over all chunks."""
        if paddle.is_grad_enabled():
            return self.head((self.hidden,), None, ChunkTarget(labels, mask, function))
        return paddle.stack(self.each(labels, mask, function)).sum()

    def each(self, labels: paddle.Tensor, mask: paddle.Tensor, function: OfPiece) -> list[Any]:
        """Call ``function(logits, labels, mask)`` for each chunk, and return the results in order. Gradients
        must be disabled."""
        return self.head((self.hidden,), None, ChunkTarget(labels, mask, function))

    def logits(self) -> Iterator[paddle.Tensor]:
        """Yield the logits ``[chunk length, b, columns]`` of each chunk, without gradients. The head's hooks
        do not run."""
        return self.head.logits_in_chunks(self.hidden)


class ChunkedHead(nn.Layer):
    """Base class of heads that can return :class:`DeferredLogits` instead of logits.

    Args:
        num_chunks: number of chunks of positions; 1: the head always returns logits.
        matmul: multiplies by the head's weight. For a loss in chunks, the head computes the weight's gradient
            in the forward pass, even if ``matmul`` defers the gradients of other weights.
    """

    def __init__(self, num_chunks: int, matmul: Matmul, *, softcap: float | None = None) -> None:
        super().__init__()
        self.num_chunks, self._matmul, self.softcap = num_chunks, matmul, softcap
        self._loss_follows = False

    @contextmanager
    def loss_follows(self) -> Iterator[None]:
        """Context manager inside which the head can return :class:`DeferredLogits`. The result of the head
        may then be used only to compute the loss."""
        self._loss_follows = self.num_chunks > 1
        try:
            yield
        finally:
            self._loss_follows = False

    def defers(self, inputs: Sequence[Any]) -> bool:
        """Return whether the head, called with ``inputs``, returns :class:`DeferredLogits`."""
        _, cache, target = (*inputs, None, None)[:3]
        return self._loss_follows and cache is None and target is None

    def capped(self, logits: paddle.Tensor) -> paddle.Tensor:
        return logits if self.softcap is None else softcapped(logits, self.softcap)

    def matrix(self) -> tuple[paddle.Tensor, paddle.Tensor | None, bool]:
        """Return the head's weight and bias, and whether the weight is stored as ``[columns, h]``."""
        raise NotImplementedError

    def gathered_hidden(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Return the hidden states at the positions of this rank's labels. Under sequence parallelism, this
        gathers the positions from all tensor-parallel ranks."""
        raise NotImplementedError

    def logits_in_chunks(self, hidden: paddle.Tensor) -> Iterator[paddle.Tensor]:
        with paddle.no_grad():
            whole = self.gathered_hidden(hidden)
            head = _HeadMatrix(*self.matrix(), self._matmul, self.capped)
        for begin, end in _edges(whole.shape[0], self.num_chunks):
            with paddle.no_grad():
                piece = head.logits(whole[begin:end], *head.parameters)
            yield piece

    def run_chunks(self, whole: paddle.Tensor, target: ChunkTarget) -> Any:
        """Run the head and ``target.function`` on each chunk of hidden states. If gradients are enabled,
        return the sum of the results; otherwise return the results in a list.

        Args:
            whole: hidden states ``[s, b, h]`` of all chunks.
        """
        weight, bias, is_transposed = self.matrix()
        head = _HeadMatrix(weight, bias, is_transposed, self._matmul, self.capped)
        if paddle.is_grad_enabled():
            return _LossInPieces.apply(whole, weight, bias, head, target, self.num_chunks)
        return [
            target.function(head.logits(piece, weight, bias), labels, mask)
            for piece, labels, mask in _pieces(whole, target, self.num_chunks)
        ]


class _HeadMatrix:
    """The weight and bias of the head, and the function that computes logits from them."""

    def __init__(
        self,
        weight: paddle.Tensor,
        bias: paddle.Tensor | None,
        is_transposed: bool,
        matmul: Matmul,
        cap: Callable[[paddle.Tensor], paddle.Tensor],
    ) -> None:
        self.parameters = [weight] if bias is None else [weight, bias]
        self.is_transposed, self.matmul, self._cap = is_transposed, matmul, cap

    def values(self) -> list[paddle.Tensor]:
        """Return the weight and the bias as new leaf tensors, detached from the parameters."""
        # The forward pass computes gradients, which must not run the hooks of the parameters.
        return [_leaf(self.matmul.leaf_value(one), one.stop_gradient) for one in self.parameters]

    def logits(
        self, hidden: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None
    ) -> paddle.Tensor:
        return self._cap(self.matmul.apart(hidden, weight, bias, self.is_transposed, self.parameters[0]))


class _LossInPieces(PyLayer):
    """Autograd function that sums the loss over the chunks, and computes gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: paddle.Tensor,
        weight: paddle.Tensor,
        bias: paddle.Tensor | None,
        head: _HeadMatrix,
        target: ChunkTarget,
        num_chunks: int,
    ) -> paddle.Tensor:
        loss, of_whole, sums = None, [], [None] * len(head.parameters)
        for piece, labels, mask in _pieces(whole, target, num_chunks):
            leaves = [_leaf(piece, whole.stop_gradient), *head.values()]
            part, gradients = _gradients(leaves, head, labels, mask, target.function)
            loss = part if loss is None else loss + part
            while len(gradients) > 1:  # each is freed as soon as it has been added
                index = len(gradients) - 2
                sums[index] = _added(sums[index], gradients.pop())
            of_whole += gradients
        ctx.gradients = [None if whole.stop_gradient else paddle.concat(of_whole), *sums]
        ctx.dtypes = [whole.dtype, *(tensor.dtype for tensor in head.parameters)]
        ctx.head = head
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, []
        head, ctx.head = ctx.head, None
        weight, matmul = head.parameters[0], head.matmul
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            scaled = gradient.multiply_(in_dtype(upstream, gradient.dtype))
            if index == 1 and matmul.adds_to_main_gradient(weight):
                matmul.add_gradient(weight, scaled)
                gradients[index] = None
            else:
                gradients[index] = in_dtype(scaled, ctx.dtypes[index])
        return tuple(gradients)


def _leaf(tensor: paddle.Tensor, stop_gradient: bool) -> paddle.Tensor:
    leaf = tensor.detach()
    leaf.stop_gradient = stop_gradient
    return leaf


def _gradients(
    leaves: Sequence[paddle.Tensor],
    head: _HeadMatrix,
    labels: paddle.Tensor,
    mask: paddle.Tensor,
    function: OfPiece,
) -> tuple[paddle.Tensor, list[paddle.Tensor | None]]:
    """Return the loss of a chunk, and its gradients with respect to ``leaves``: the chunk of hidden states,
    the weight and, if the head has one, the bias. A leaf that does not require a gradient gets None."""
    with paddle.enable_grad():
        part = function(head.logits(*leaves), labels, mask)
        part.backward()  # not paddle.grad, which keeps tensors saved by PyLayers until garbage collection
    return part.detach(), [leaf.grad for leaf in leaves]


def _added(total: paddle.Tensor | None, gradient: paddle.Tensor | None) -> paddle.Tensor | None:
    if gradient is None:
        return total
    gradient = in_dtype(gradient, paddle.float32)
    return gradient if total is None else total.add_(gradient)


def _pieces(
    whole: paddle.Tensor, target: ChunkTarget, num_chunks: int
) -> Iterator[tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]]:
    """Yield hidden states, labels and mask of each chunk in order. The lengths differ by at most one."""
    for begin, end in _edges(whole.shape[0], num_chunks):
        yield whole[begin:end], target.labels[:, begin:end], target.mask[:, begin:end]


def _edges(length: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    count = min(num_chunks, length)
    return pairwise([length * index // count for index in range(count + 1)])
