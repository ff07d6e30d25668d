"""Schedules without virtual stages on Paddle's pipeline, from a list of passes: ZB-H1, and 1F1B.

In ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023) a backward pass is done in two parts: the
gradients of inputs (B), which the stage before waits for, and those of weights (W), which fill the time in
which 1F1B waits. :func:`order_of` says when each runs.

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

from ppfleetx.config.schedules import Pass, order_of
from ppfleetx.nn.products import SplitProducts


class ListedPipeline(PipelineParallel):
    """Paddle's pipeline, training in the order of a list of passes; it evaluates as Paddle does.

    Args:
        model: this rank's stages.
        products: the products of these stages, which leave the gradients of weights for later: ZB-H1. None:
            1F1B.
    """

    def __init__(self, model: PipelineLayer, products: SplitProducts | None) -> None:
        hcg = fleet.get_hybrid_communicate_group()
        super().__init__(layers=model, hcg=hcg, strategy=fleet.fleet._user_defined_strategy)
        self._products = products
        self._is_first, self._is_last = self.is_pipeline_first_stage(), self.is_pipeline_last_stage()
        self._following: dict[Pass, Pass] = {}
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._input: Any = None

    def forward_backward_pipeline(self, data: Iterator[Any], scaler: Any = None) -> None:
        """Run a step's passes; ``data`` gives (input, batch of the loss) of each micro batch."""
        assert scaler is None, "the loss is scaled where it is computed"
        order = self._begin_passes()
        for work in order:
            if work.part == "W":
                self._products.run_next()
            elif work.part == "F":
                self._forward(data, work)
            else:
                self._backward(work)
        self._end_passes()

    def _begin_passes(self) -> list[Pass]:
        self._reset_user_hooks_status()
        self.user_hooks_enabled = True
        self.scaler, self.total_loss, self.micro_batch_id = None, None, 0
        self._under_way.clear()
        if self._products is not None:
            self._products.begin()
        schedule = "1f1b" if self._products is None else "zb_h1"
        order = order_of(schedule, self.stage_id, self.num_stages, self.accumulate_steps)
        self._following = dict(pairwise(work for work in order if work.part != "W"))
        self._input = self._fetch_input()
        return order

    def _end_passes(self) -> None:
        self.processed_steps += 1

    def _follows(self, work: Pass, part: str) -> bool:
        """Whether the next pass with messages is such a one."""
        following = self._following.get(work)
        return following is not None and following.part == part

    def _fetch_input(self) -> Any:
        return self._p2p_helper.recv_forward(self._is_first, batch_p2p_comm=self._use_batch_p2p_comm)

    def _forward(self, data: Iterator[Any], work: Pass) -> None:
        given = self._input
        output, _, _ = self._forward_step(given, data, step_id=work.micro)
        self._p2p_helper.send_forward(output, self._is_last, batch_p2p_comm=self._use_batch_p2p_comm)
        self._keep(given, output)
        self._input = self._fetch_input() if self._follows(work, "F") else None

    def _keep(self, given: Any, output: Any) -> None:
        """What the backward pass needs: not the values of an output that another rank has."""
        if not self._is_last:
            self._release_output(output)
        self._under_way.append((given, output))

    def _backward(self, work: Pass) -> None:
        upstream = self._p2p_helper.recv_backward(self._is_last, batch_p2p_comm=self._use_batch_p2p_comm)
        gradient = self._input_gradient(upstream, work)
        self._input = self._fetch_input() if self._follows(work, "F") else None
        self._p2p_helper.send_backward(gradient, self._is_first, batch_p2p_comm=self._use_batch_p2p_comm)

    def _input_gradient(self, upstream: Any, work: Pass) -> tuple[paddle.Tensor, ...] | None:
        """The gradient of the oldest forward pass's input; with ZB-H1 weights get theirs later."""
        gradient = self._backward_step(*self._under_way.popleft(), upstream, step_id=work.micro)
        if self._products is not None:
            self._products.end_backward()
        return gradient
