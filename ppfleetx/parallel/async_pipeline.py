"""A pipeline whose messages travel while it computes.

A send is not waited for before the next pass, and a receive is started one pass before its message is
needed. Between two neighbours the messages keep the order of Paddle's 1F1B: forward passes until the pipeline
is full, then a gradient for each input. So the n-th send of a pair meets the n-th receive, as NCCL and the
CPU groups want it. At most one message is under way to each neighbour, and one more activation is held than
in 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paddle.distributed.fleet.meta_parallel import PipelineLayer
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as p2p

from ppfleetx.config.schedules import Pass
from ppfleetx.nn.products import SplitProducts
from ppfleetx.parallel.listed_pipeline import ListedPipeline


@dataclass
class _Receive:
    """Tensors that are on their way."""

    tensors: Any
    tasks: list[Any]

    def wait(self) -> Any:
        for task in self.tasks:
            task.wait()
        return self.tensors


class AsyncPipeline(ListedPipeline):
    """A :class:`ListedPipeline` that does not wait for what it sends, and asks early for what it needs."""

    def __init__(self, model: PipelineLayer, products: SplitProducts | None) -> None:
        super().__init__(model, products)
        self._sent: dict[str, list[Any]] = {}
        self._upstream: _Receive | None = None

    def _fetch_input(self) -> _Receive | None:
        if self._is_first:
            return None
        self._p2p_helper._recv_meta()
        tensors, _, tasks = self._start(recv_prev=True)
        return _Receive(tensors, tasks)

    def _fetch_upstream(self) -> _Receive | None:
        if self._is_last:
            return None
        _, tensors, tasks = self._start(recv_next=True)
        return _Receive(tensors, tasks)

    def _forward(self, data: Iterator[Any], work: Pass) -> None:
        given = None if self._input is None else self._input.wait()
        has_more = work.micro + 1 < self.accumulate_steps
        self._input = self._fetch_input() if has_more else None
        output, _, _ = self._forward_step(given, data, step_id=work.micro)
        if not self._is_last:
            self._p2p_helper._send_meta(output)
            self._send("tensor_send_next", output)
        self._keep(given, output)
        if self._follows(work, "B"):
            self._upstream = self._fetch_upstream()

    def _backward(self, work: Pass) -> None:
        upstream = None if self._upstream is None else self._upstream.wait()
        self._upstream = self._fetch_upstream() if self._follows(work, "B") else None
        gradient = self._input_gradient(upstream, work)
        if not self._is_first:
            self._send("tensor_send_prev", gradient)

    def _end_passes(self) -> None:
        for direction in self._sent:
            self._complete(direction)
        super()._end_passes()

    def _send(self, direction: str, tensors: Any) -> None:
        self._complete(direction)
        # Tensors of their own: those of the model are emptied while the message is still under way.
        tensors = tuple(tensor.detach() for tensor in tensors)
        _, _, self._sent[direction] = self._start(**{direction: tensors})

    def _complete(self, direction: str) -> None:
        for task in self._sent.get(direction, ()):
            task.wait()
        self._sent[direction] = []

    def _start(self, **what: Any) -> tuple[Any, Any, list[Any]]:
        nothing = {"tensor_send_next": None, "tensor_send_prev": None, "recv_prev": False, "recv_next": False}
        return p2p._p2p_helper(
            **{**nothing, **what},
            send_recv_meta=self._p2p_helper._send_recv_meta,
            batch_p2p_comm=False,
            wait_on_reqs=False,
        )
