"""Sharding stage 3 (ZeRO-3): only the owner of a parameter keeps its values. Other ranks hold the values only
while a layer uses them. While a layer computes, the values of the next layer are in transit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import paddle
from paddle import distributed
from paddle.autograd import PyLayer

from ppfleetx.distributed.collectives import aligned_offsets
from ppfleetx.nn.chunked_loss import ChunkedHead, DeferredLogits

if TYPE_CHECKING:
    from ppfleetx.parallel.sharding import Sharding


class ParameterSharding:
    """Fetches the parameter values of each layer from their owners just before use, and frees them afterwards
    (sharding stage 3).

    Args:
        indexed_layers: the model's layers on this rank, such as the embedding and the blocks, each as (index
            in the model, layer).
        ahead: whether the values of the next layer are fetched while a layer computes.
    """

    def __init__(
        self, owning: Sharding, indexed_layers: Sequence[tuple[int, paddle.nn.Layer]], *, ahead: bool = True
    ) -> None:
        self._owning = owning
        by_index = dict(indexed_layers)
        self._after = {id(by_index[i - 1]): by_index[i] for i in by_index if i - 1 in by_index and ahead}
        self._before = {id(by_index[i + 1]): by_index[i] for i in by_index if i + 1 in by_index and ahead}
        self._returns: set[int] = set()  # layers that the backward pass reaches
        self._next: tuple[paddle.nn.Layer, _Fetch] | None = None
        for _, layer in indexed_layers:
            layer.register_forward_pre_hook(self._before_forward)
            layer.register_forward_post_hook(self._after_forward)
            self._drop(layer)

    def updated(self) -> None:
        """Discard values that were fetched before the update, because they are out of date."""
        self.finish()

    def finish(self) -> None:
        """Wait for the fetch in progress, if any, and discard the fetched values."""
        if self._next is not None:
            (_, fetch), self._next = self._next, None
            fetch.wait()

    def _before_forward(self, layer: paddle.nn.Layer, inputs: tuple) -> tuple:
        if isinstance(layer, ChunkedHead) and layer.defers(inputs):
            return inputs
        self._fetch(layer, self._after.get(id(layer)))
        state, *rest = inputs
        if layer.training and paddle.is_grad_enabled() and not state[0].stop_gradient:
            state = (_AtBackward.apply(state[0], lambda: self._drop(layer)), *state[1:])
        return (state, *rest)

    def _after_forward(self, layer: paddle.nn.Layer, inputs: tuple, output: Any) -> Any:
        if isinstance(output, DeferredLogits):
            return output
        self._drop(layer)
        self._returns.discard(id(layer))
        if not (layer.training and paddle.is_grad_enabled()):
            return output
        if inputs[0][0].stop_gradient and all(p.stop_gradient for p in layer.parameters()):
            return output  # the backward pass does not reach a frozen first layer
        self._returns.add(id(layer))
        fetch = lambda: self._fetch_back(layer)  # noqa: E731
        if isinstance(output, tuple):
            return (_AtBackward.apply(output[0], fetch), *output[1:])
        return _AtBackward.apply(output, fetch)

    def _fetch_back(self, layer: paddle.nn.Layer) -> None:
        before = self._before.get(id(layer))
        self._fetch(layer, before if id(before) in self._returns else None)

    def _fetch(self, layer: paddle.nn.Layer, following: paddle.nn.Layer | None) -> None:
        if self._next is not None and self._next[0] is not layer:
            self.finish()
        # Broadcasts start at fixed points of the program, so all ranks of a group issue them in the same
        # order.
        fetch = _Fetch(layer, self._owning) if self._next is None else self._next[1]
        self._next = None
        fetch.complete()
        if following is not None:
            self._next = following, _Fetch(following, self._owning)

    def _drop(self, layer: paddle.nn.Layer) -> None:
        for parameter in layer.parameters():
            if not self._owning.owns(parameter) and parameter._is_initialized():
                parameter._clear_data()


@dataclass
class _Message:
    """An unfinished broadcast of the values of ``parameters``.

    Attributes:
        flat: the values of all parameters in one tensor.
        offsets: index in ``flat`` of the first value of each parameter.
        mine: whether this rank owns the parameters.
    """

    flat: paddle.Tensor
    parameters: list[paddle.Tensor]
    offsets: list[int]
    mine: bool
    task: Any


class _Fetch:
    """An unfinished fetch of one layer's parameter values, with one broadcast per process group, owner and
    dtype."""

    def __init__(self, layer: paddle.nn.Layer, owning: Sharding) -> None:
        kinds: dict[tuple[int, int, Any], list[paddle.Tensor]] = {}
        for parameter in layer.parameters():
            group = owning.group_of(parameter)
            if group is not None:
                kind = group.id, owning.owner_of(parameter), parameter.dtype
                kinds.setdefault(kind, []).append(parameter)
        self._messages = [self._start(members, owning) for members in kinds.values()]

    @paddle.no_grad()
    def _start(self, parameters: list[paddle.Tensor], owning: Sharding) -> _Message:
        group, owner = owning.group_of(parameters[0]), owning.owner_of(parameters[0])
        mine = owner == group.rank
        offsets, end = aligned_offsets([p.size for p in parameters], parameters[0].element_size())
        if mine and len(parameters) == 1:
            flat = parameters[0].detach()
        elif mine:
            flat = paddle.zeros([end], parameters[0].dtype)
            for parameter, begin in zip(parameters, offsets, strict=True):
                part = flat._slice(begin, begin + parameter.size)
                paddle.assign(parameter.detach().reshape([-1]), part)
        else:
            flat = paddle.empty([end], parameters[0].dtype)
        task = distributed.broadcast(flat, group.ranks[owner], group=group, sync_op=False)
        return _Message(flat, parameters, offsets, mine, task)

    def wait(self) -> None:
        for message in self._messages:
            message.task.wait()
        self._messages = []

    def complete(self) -> None:
        for message in self._messages:
            message.task.wait()
            for parameter, begin in zip(message.parameters, message.offsets, strict=True):
                if not message.mine:
                    part = message.flat._slice(begin, begin + parameter.size)
                    part.reshape_(parameter.shape)._share_buffer_to(parameter)
        self._messages = []


class _AtBackward(PyLayer):
    """Autograd function that returns a copy of ``tensor``. Its backward pass runs ``call``, and returns the
    gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, call: Any) -> paddle.Tensor:
        ctx.call = call
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        ctx.call()
        return upstream
