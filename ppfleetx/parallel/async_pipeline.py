"""A 1F1B pipeline that overlaps its messages with computation.

The next pass does not wait for a send, and a receive starts one pass before its message is needed. Between
two neighbours, messages keep the order of Paddle's 1F1B: forward passes until the pipeline is full, then a
gradient for each input. So the n-th send of a pair meets the n-th receive, as NCCL and the CPU groups
require. At most one message is in transit to each neighbour. This schedule holds one more activation than
1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle.distributed.fleet.meta_parallel import PipelineLayer

from ppfleetx.config.schedules import Pass
from ppfleetx.nn.matmul import Matmul
from ppfleetx.parallel.pipeline_schedules import ListedPipeline, Receive


class AsyncPipeline(ListedPipeline):
    """A :class:`ListedPipeline` that does not wait for its sends and starts its receives early."""

    def __init__(self, model: PipelineLayer, matmul: Matmul) -> None:
        super().__init__(model, matmul)
        self._upstream: Receive | None = None

    def _forward(self, data: Iterator[Any], work: Pass) -> None:
        given = None if self._input is None else self._input.wait()
        has_more = work.micro + 1 < self.accumulate_steps
        self._input = self._fetch_input() if has_more else None
        output, _, _ = self._forward_step(given, data, step_id=work.micro)
        self._send_output(output)
        self._keep(given, output)
        if self._follows(work, "B"):
            self._upstream = self._fetch_upstream()

    def _backward(self, work: Pass) -> None:
        upstream = None if self._upstream is None else self._upstream.wait()
        self._upstream = self._fetch_upstream() if self._follows(work, "B") else None
        gradient = self._input_gradient(upstream, work)
        self._send_gradient(gradient)
