"""Gradient reductions that overlap the backward pass. Parameters are grouped into buckets, in reverse model
order. The gradients of a bucket are sent as soon as all of them are complete."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import paddle

from ppfleetx.distributed.collectives import flatten_in_place
from ppfleetx.optims.gradients import complete_gradient, is_in_use

Start = Callable[[paddle.Tensor], Any]
"""A function that starts an in-place reduction of a flat tensor, and returns the task to wait for."""


BUCKETS_IN_SIZE = 2
"""Number of buckets whose total size is ``Distributed.bucket_size``: one is in transit while the next one
fills up. In sharding stages 2 and 3, ``bucket_size`` is the size of one bucket."""

_NEARLY_FULL = 0.75


class SendOrder:
    """Calls ``send(index)`` for each bucket when all gradients of the bucket are complete. The calls are in
    the order of ``buckets``: a complete bucket waits for the buckets before it.

    Args:
        buckets: the parameters of each bucket. A parameter can be in only one bucket.
        each_pass: whether each bucket is sent after every backward pass of a step; False: once per step.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[paddle.Tensor]],
        send: Callable[[int], None],
        *,
        each_pass: bool = False,
    ) -> None:
        # All ranks send in this order, as collectives require.
        self._buckets, self._send, self._each_pass = buckets, send, each_pass
        # Number of times that one backward pass adds to a gradient, by the parameter's id. With
        # recomputation, it can be more than one.
        self._per_pass: dict[int, int] = {}
        self._is_first_step = True
        self.begin(0)
        for parameter in (p for bucket in buckets for p in bucket):
            parameter._register_backward_hook(lambda *_, p=parameter: self._on_gradient(p))

    def begin(self, num_passes: int) -> None:
        self._num_passes, self._counts, self._num_sent = num_passes, Counter[int](), 0

    def complete(self, parameters: Iterable[paddle.Tensor], passes: int) -> None:
        """Record that the first ``passes`` backward passes of this step have finished for ``parameters``, and
        send the buckets that are now complete. Missing gradients are sent as zeros."""
        for parameter in parameters:
            key = id(parameter)
            self._counts[key] = max(self._counts[key], self._per_pass.get(key, 1) * passes)
        self._send_complete()

    def finish(self) -> None:
        while self._num_sent < self._num_sends:
            self._send_next()
        if not self._num_passes:
            return
        if self._is_first_step and self._each_pass:
            # A gradient to which a pass adds several times may have been sent too early. Send the remainder.
            for index in range(len(self._buckets)):
                self._send(index)
        self._is_first_step = False
        for key, count in self._counts.items():
            if count % self._num_passes == 0:
                self._per_pass.setdefault(key, count // self._num_passes)

    @property
    def _num_sends(self) -> int:
        return len(self._buckets) * (self._num_passes if self._each_pass else 1)

    def _on_gradient(self, parameter: paddle.Tensor) -> None:
        key = id(parameter)
        self._counts[key] += 1
        assumed = 1 if self._each_pass and not self._is_first_step else None
        parts = self._per_pass.get(key, assumed)
        if parts is not None and self._counts[key] > parts * self._num_passes > 0:
            raise RuntimeError(
                f"{parameter.info.name}: more was added to its gradient than in the steps before; set "
                "Distributed.sharding.reduce_overlap to False and sharding_stage to 1"
            )
        self._send_complete()

    def _send_complete(self) -> None:
        while self._num_sent < self._num_sends and self._is_complete():
            self._send_next()

    def _is_complete(self) -> bool:
        earlier, index = divmod(self._num_sent, len(self._buckets))
        passes = earlier + 1 if self._each_pass else self._num_passes
        return all(not is_in_use(p) or self._has(p, passes) for p in self._buckets[index])

    def _has(self, parameter: paddle.Tensor, passes: int) -> bool:
        parts = self._per_pass.get(id(parameter), 1 if self._each_pass else math.inf)
        return self._counts[id(parameter)] >= parts * passes

    def _send_next(self) -> None:
        self._num_sent += 1
        self._send((self._num_sent - 1) % len(self._buckets))


class Bucket(NamedTuple):
    """Parameters whose gradients are reduced in one message. ``start`` starts the reduction, and ``done`` is
    called when the reduction is complete."""

    parameters: Sequence[paddle.Tensor]
    start: Start
    done: Callable[[], None] = lambda: None


class BucketSums:
    """Reduces the gradients of each bucket once per step, in the order of ``buckets``. A parameter can be in
    only one bucket."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)
        self._order = SendOrder([bucket.parameters for bucket in buckets], self._send)
        self._under_way: deque[tuple[Any, Bucket]] = deque()

    def begin(self, num_passes: int) -> None:
        self._order.begin(num_passes)

    def finish(self) -> None:
        self._order.finish()
        while self._under_way:
            self._complete()

    def _send(self, index: int) -> None:
        bucket = self._buckets[index]
        gradients = [complete_gradient(p) for p in bucket.parameters if is_in_use(p)]
        # Completing early frees memory; it does not change the order of sends.
        while self._under_way and self._under_way[0][0].is_completed():
            self._complete()
        if gradients:
            self._under_way.append((bucket.start(flatten_in_place(gradients)), bucket))

    def _complete(self) -> None:
        task, bucket = self._under_way.popleft()
        task.wait()
        bucket.done()


def cut(
    parameters: Sequence[paddle.Tensor], nbytes: int, key: Callable[[paddle.Tensor], Any] = lambda _: None
) -> list[tuple[Any, list[paddle.Tensor]]]:
    """Split parameters into buckets of up to ``nbytes``. A parameter of ``nbytes`` or more gets its own
    bucket. All parameters of a bucket have the same dtype and the same ``key(parameter)``. Returns (key,
    parameters) for each bucket, sorted by the position of the bucket's last parameter in ``parameters``."""
    buckets: list[tuple[Any, list[paddle.Tensor]]] = []
    open_buckets: dict[Any, tuple[list[paddle.Tensor], int]] = {}
    for parameter in parameters:
        kind = (key(parameter), parameter.dtype)
        more = parameter.size * parameter.element_size()
        if more >= nbytes:
            buckets.append((kind[0], [parameter]))
            continue
        bucket, size = open_buckets.pop(kind, ([], 0))
        if not bucket or size + more > nbytes:
            bucket, size = [], 0
            buckets.append((kind[0], bucket))
        bucket.append(parameter)
        # Close a bucket that is nearly full, so that it does not wait for a few bytes.
        if size + more < _NEARLY_FULL * nbytes:
            open_buckets[kind] = (bucket, size + more)
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    return sorted(buckets, key=lambda bucket: place[id(bucket[1][-1])])
