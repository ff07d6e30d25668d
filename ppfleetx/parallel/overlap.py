"""Sums of gradients that travel while the backward pass still runs.

Parameters are put into buckets in the reverse of the model's order, in which the backward pass reaches them.
A bucket is sent when all its gradients are complete: in the last micro batch, or in a pipeline when the
stage's last backward pass has come by. Buckets are sent in their order and no other, whatever is
ready first, at points of the program that do not depend on time: so the ranks of a group issue the same
operations in the same order, those of the model between them included.

The pass never waits: a bucket is started and left to the link, however many are before it. That takes no
memory, because the gradients of a bucket move into one piece and live there from then on; only while they
move is their memory needed twice. :meth:`BucketSums.finish` sends what is left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import paddle

from ppfleetx.distributed.collectives import move_together
from ppfleetx.optims.gradients import complete_gradient, expects_gradient

Start = Callable[[paddle.Tensor], Any]
"""Starts the sum of a flat tensor, in place, and returns the task to wait for."""


BUCKETS_IN_SIZE = 2
"""``Distributed.bucket_size`` is what so many buckets hold: one is on its way while the next one fills up."""

_NEARLY_FULL = 0.75


class Bucket:
    """Parameters whose gradients travel together.

    Args:
        parameters: in the order of the backward pass.
        start: see :data:`Start`.
        done: called when the sums are there.
    """

    def __init__(
        self, parameters: Sequence[paddle.Tensor], start: Start, done: Callable[[], None] = lambda: None
    ) -> None:
        self.parameters, self.start, self.done = list(parameters), start, done


class BucketSums:
    """Sends buckets of gradients as they become complete.

    How often a backward pass adds to a parameter's gradient (recomputation may do so in parts) is counted in
    the first step, whose sums are all sent at its end.

    Args:
        buckets: in the order in which they are sent; no parameter is in two.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)
        self._of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._per_pass: dict[int, int] | None = None
        self._num_passes, self._counts = 0, Counter[int]()
        self._missing: list[int] = []
        self._next = 0
        self._under_way: deque[tuple[Any, Bucket]] = deque()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter._register_backward_hook(lambda *_, p=parameter: self._on_gradient(p))

    def begin(self, num_passes: int) -> None:
        """A step begins, with so many micro batches."""
        self._num_passes, self._counts, self._next = num_passes, Counter(), 0
        self._missing = [len(bucket.parameters) for bucket in self._buckets]

    def finish(self) -> None:
        """Send what has not been sent, and wait until all sums are there."""
        while self._next < len(self._buckets):
            self._send()
        while self._under_way:
            self._complete()
        if self._per_pass is None and self._num_passes:
            self._per_pass = {
                key: count // self._num_passes
                for key, count in self._counts.items()
                if count % self._num_passes == 0
            }

    def _on_gradient(self, parameter: paddle.Tensor) -> None:
        """A backward pass has added to the gradient."""
        key = id(parameter)
        self._counts[key] += 1
        expected = (self._per_pass or {}).get(key, 0) * self._num_passes
        if not expected:
            return
        if self._counts[key] > expected:
            raise RuntimeError(
                f"{parameter.info.name}: more was added to its gradient in this step than in the first one; "
                "set Distributed.sharding.reduce_overlap to False"
            )
        if self._counts[key] == expected:
            self._missing[self._of[key]] -= 1
            self._send_complete()

    def _send_complete(self) -> None:
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        gradients = [complete_gradient(p) for p in bucket.parameters if expects_gradient(p)]
        self._next += 1
        # Asked for the sake of memory alone, which `done` may free: what is sent when does not depend on it.
        while self._under_way and self._under_way[0][0].is_completed():
            self._complete()
        if gradients:
            self._under_way.append((bucket.start(move_together(gradients)), bucket))

    def _complete(self) -> None:
        """Wait for the oldest."""
        task, bucket = self._under_way.popleft()
        task.wait()
        bucket.done()


def cut(
    parameters: Sequence[paddle.Tensor], nbytes: int, key: Callable[[paddle.Tensor], Any] = lambda _: None
) -> list[tuple[Any, list[paddle.Tensor]]]:
    """(key, parameters) of buckets of up to ``nbytes``, one key and one type in each.

    In the order in which they are complete when the parameters come in their order. One that is nearly full
    takes nothing more, lest it wait for a few bytes. A parameter that fills a bucket by itself is alone, and
    those before it go on collecting.
    """
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
        if size + more < _NEARLY_FULL * nbytes:
            open_buckets[kind] = (bucket, size + more)
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    return sorted(buckets, key=lambda bucket: place[id(bucket[1][-1])])
