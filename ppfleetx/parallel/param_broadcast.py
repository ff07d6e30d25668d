"""Sharding stages 1 and 2: after an update, the owner of each parameter sends the new values to the other
ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import paddle
from paddle import distributed

from ppfleetx.distributed.collectives import Packed

if TYPE_CHECKING:
    from ppfleetx.parallel.sharding import Sharding

SMALL_BYTES = 256 << 10
"""Parameters smaller than this many bytes are packed into common messages, because the latency of a small
message exceeds its transfer time."""


class ParamBroadcast:
    """Broadcasts the new values of each parameter from its owner after an update. Code other than forward
    passes must call :meth:`finish` before it reads parameters.

    Args:
        parameters: this rank's parameters without duplicates, in the order of the forward pass.
        layers: layers that wait for their new values at the start of their forward pass; None:
            :meth:`updated` waits for all values.
        packed_bytes: limit on the total size of the small parameters (norms, biases) that share messages. All
            other parameters are sent one by one.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        owning: Sharding,
        layers: Sequence[paddle.nn.Layer] | None,
        packed_bytes: int,
    ) -> None:
        self._owning = owning
        self._overlaps = layers is not None
        self._packed: list[Packed] = []
        self._tasks: dict[int, Any] = {}  # by the parameter's id, in the order of sending
        # Small parameters (norms, biases) of an owner share a message, which is sent first. Other parameters
        # are received directly in their own memory, as in Paddle's `DygraphShardingOptimizer` with
        # `broadcast_overlap`.
        small, size = [], 0
        shared = [p for p in parameters if owning.group_of(p) is not None]
        for parameter in shared:
            more = parameter.size * parameter.element_size()
            if more < SMALL_BYTES and size + more <= packed_bytes:
                small.append(parameter)
                size += more
        self._small = self._by_owner(small)
        small = {id(p) for p in small}
        self._large = [p for p in shared if id(p) not in small]
        for layer in layers or ():
            layer.register_forward_pre_hook(self._before_forward)

    @paddle.no_grad()
    def updated(self) -> None:
        """Broadcast the new values after an update. If broadcasts overlap the next forward pass, start them
        without waiting."""
        self.finish()
        for members in self._small:
            for dtype in dict.fromkeys(p.dtype for p in members):
                same = [p for p in members if p.dtype == dtype]
                self._packed.append(Packed(same, self._start(same[0])))
        for parameter in self._large:
            self._tasks[id(parameter)] = self._start(parameter)(parameter.detach())
        if not self._overlaps:
            self.finish()

    def finish(self) -> None:
        self._finish_small()
        while self._tasks:
            self._tasks.pop(next(iter(self._tasks))).wait()

    def _by_owner(self, parameters: Sequence[paddle.Tensor]) -> list[list[paddle.Tensor]]:
        found: dict[tuple[int, int], list[paddle.Tensor]] = {}
        for parameter in parameters:
            place = self._owning.group_of(parameter).id, self._owning.owner_of(parameter)
            found.setdefault(place, []).append(parameter)
        return [found[place] for place in sorted(found)]

    def _start(self, parameter: paddle.Tensor) -> Callable[[paddle.Tensor], Any]:
        group = self._owning.group_of(parameter)
        source = group.ranks[self._owning.owner_of(parameter)]
        return lambda flat: distributed.broadcast(flat, source, group=group, sync_op=False)

    def _finish_small(self) -> None:
        while self._packed:
            self._packed.pop(0).complete()

    def _before_forward(self, layer: paddle.nn.Layer, _: Any) -> None:
        if not self._tasks and not self._packed:
            return
        self._finish_small()
        for parameter in layer.parameters():
            task = self._tasks.pop(id(parameter), None)
            if task is not None:
                task.wait()
