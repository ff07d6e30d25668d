"""The schedule ZB-H1 on Paddle's pipeline (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).

A backward pass is done in two parts: the gradients of inputs (B), which the stage before waits for, and those
of weights (W), which fill the time in which 1F1B waits. :func:`zero_bubble_order` says when each runs.

The messages are those of Paddle's 1F1B in the same order: after B the next forward pass's input is fetched
before the gradient is sent. So sends and receives of neighbours meet where a send waits for its receive, as
on a GPU. It costs nothing: the stage before sends that input before it asks for the gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import PipelineLayer, PipelineParallel

from ppfleetx.config.schedules import Pass, zero_bubble_order
from ppfleetx.nn.products import SplitProducts


class ZeroBubblePipeline(PipelineParallel):
    """Paddle's pipeline without virtual stages, training in the order of ZB-H1; it evaluates as Paddle does.

    Args:
        model: this rank's stages.
        products: the products of these stages, which leave the gradients of weights for later.
    """

    def __init__(self, model: PipelineLayer, products: SplitProducts) -> None:
        hcg = fleet.get_hybrid_communicate_group()
        super().__init__(layers=model, hcg=hcg, strategy=fleet.fleet._user_defined_strategy)
        self._products = products
        self._is_first, self._is_last = self.is_pipeline_first_stage(), self.is_pipeline_last_stage()

    def forward_backward_pipeline(self, data: Iterator[Any], scaler: Any = None) -> None:
        """Run a step's passes; ``data`` gives (input, batch of the loss) of each micro batch."""
        assert scaler is None, "the loss is scaled where it is computed"
        self._begin_passes()
        order = zero_bubble_order(self.stage_id, self.num_stages, self.accumulate_steps)
        messages = [work for work in order if work.part != "W"]
        fetches_next = {work for work, following in pairwise(messages) if following.part == "F"}
        under_way: deque[tuple[Any, Any]] = deque()
        fetched = self._fetch_input() if messages else None
        for work in order:
            if work.part == "W":
                self._products.run_next()
                continue
            if work.part == "F":
                under_way.append(self._forward(fetched, data, work))
                gradient = None
            else:
                gradient = self._backward(*under_way.popleft(), work)
            fetched = self._fetch_input() if work in fetches_next else None
            if work.part == "B":
                self._p2p_helper.send_backward(gradient, self._is_first, self._use_batch_p2p_comm)
        self.processed_steps += 1

    def _begin_passes(self) -> None:
        self._reset_user_hooks_status()
        self.user_hooks_enabled = True
        self.scaler, self.total_loss, self.micro_batch_id = None, None, 0
        self._products.begin()

    def _fetch_input(self) -> Any:
        return self._p2p_helper.recv_forward(self._is_first, batch_p2p_comm=self._use_batch_p2p_comm)

    def _forward(self, given: Any, data: Iterator[Any], work: Pass) -> tuple[Any, Any]:
        """Input and output of a forward pass; the output has been sent and holds no values any more."""
        output, _, _ = self._forward_step(given, data, step_id=work.micro)
        self._p2p_helper.send_forward(output, self._is_last, batch_p2p_comm=self._use_batch_p2p_comm)
        if not self._is_last:
            self._release_output(output)
        return given, output

    def _backward(self, given: Any, output: Any, work: Pass) -> tuple[paddle.Tensor, ...] | None:
        """The gradient of a forward pass's input; that of the weights is left to the products."""
        upstream = self._p2p_helper.recv_backward(self._is_last, batch_p2p_comm=self._use_batch_p2p_comm)
        gradient = self._backward_step(given, output, upstream, step_id=work.micro)
        self._products.end_backward()
        return gradient
