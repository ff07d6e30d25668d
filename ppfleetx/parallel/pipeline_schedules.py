"""Pipeline schedules in addition to Paddle's, and corrections of Paddle's schedules.

:class:`ListedPipeline` runs ZB-H1 or 1F1B from a list of passes (:func:`order_of`). The corrections change
the order of messages. On device plugins, Paddle's order can deadlock (:func:`take_turns`). With virtual
stages on two ranks, it would mix up activations and gradients (:func:`interleave_two_stages`).

In ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023), a backward pass has two parts. B computes the
gradients of inputs, which the previous stage needs next. W computes the gradients of weights, in time that is
idle in 1F1B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import (
    PipelineLayer,
    PipelineParallel,
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
)
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as p2p

from ppfleetx.config.pipeline_order import Pass, order_of
from ppfleetx.nn.matmul import Matmul


@dataclass
class Receive:
    """An unfinished receive from a neighboring pipeline stage."""

    tensors: Any
    tasks: list[Any]

    def wait(self) -> Any:
        for task in self.tasks:
            task.wait()
        return self.tensors


@dataclass
class _Sent:
    """A started send, with the tensors that must be kept in memory until it is complete."""

    # Paddle may free them too early: when one NCCL task is awaited, it forgets which streams still read
    # memory (`NCCLTask::RemoveHolderStreamInGroup`).
    tensors: tuple[paddle.Tensor, ...]
    tasks: list[Any]


class ListedPipeline(PipelineParallel):
    """A Paddle pipeline that trains with the schedule ZB-H1 or 1F1B, and evaluates with Paddle's schedule.

    Args:
        model: the stages of this rank.
        matmul: computes the matmuls with the weights of ``model``. If it defers weight gradients, the
            schedule is ZB-H1, otherwise 1F1B.
    """

    def __init__(self, model: PipelineLayer, matmul: Matmul) -> None:
        hcg = fleet.get_hybrid_communicate_group()
        super().__init__(layers=model, hcg=hcg, strategy=fleet.fleet._user_defined_strategy)
        self._matmul = matmul
        self._is_first, self._is_last = self.is_pipeline_first_stage(), self.is_pipeline_last_stage()
        self._following: dict[Pass, Pass] = {}
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._input: Receive | None = None
        self._sent: dict[str, _Sent] = {}

    def forward_backward_pipeline(self, data: Iterator[Any], scaler: Any = None) -> None:
        """Run all passes of a step. ``data`` yields (input, batch for the loss) of each micro batch."""
        assert scaler is None, "the loss is scaled where it is computed"
        order = self._begin_passes()
        for work in order:
            if work.part == "W":
                self._matmul.run_next()
            elif work.part == "F":
                self._forward(data, work)
            else:
                self._backward(work)
        for direction in list(self._sent):
            self._complete(direction)
        self.processed_steps += 1

    def _begin_passes(self) -> list[Pass]:
        self._reset_user_hooks_status()
        self.user_hooks_enabled = True
        self.scaler, self.total_loss, self.micro_batch_id = None, None, 0
        self._under_way.clear()
        self._matmul.begin()
        schedule = "zb_h1" if self._matmul.defers else "1f1b"
        order = order_of(schedule, self.stage_id, self.num_stages, self.accumulate_steps)
        self._following = dict(pairwise(work for work in order if work.part != "W"))
        self._input = self._fetch_input()
        return order

    def _follows(self, work: Pass, part: str) -> bool:
        following = self._following.get(work)
        return following is not None and following.part == part

    def _forward(self, data: Iterator[Any], work: Pass) -> None:
        given = None if self._input is None else self._input.wait()
        output, _, _ = self._forward_step(given, data, step_id=work.micro)
        self._send_output(output)
        self._complete("tensor_send_next")
        self._keep(given, output)
        self._input = self._fetch_input() if self._follows(work, "F") else None

    def _keep(self, given: Any, output: Any) -> None:
        """Keep the input and output of a forward pass for the backward pass."""
        # The output was sent, and the backward pass needs only its autograd graph.
        if not self._is_last:
            self._release_output(output)
        self._under_way.append((given, output))

    def _backward(self, work: Pass) -> None:
        coming = self._fetch_upstream()
        gradient = self._input_gradient(None if coming is None else coming.wait(), work)
        # As in Paddle's 1F1B, start to receive before sending, because the previous stage sends this input
        # before it receives the gradient. Messages then match even if a send waits for its receive, as on a
        # GPU.
        self._input = self._fetch_input() if self._follows(work, "F") else None
        self._send_gradient(gradient)

    def _input_gradient(self, upstream: Any, work: Pass) -> tuple[paddle.Tensor, ...] | None:
        """Run the backward pass of the oldest micro batch in progress, and return the gradient of the stage's
        input. In ZB-H1, weight gradients are left for later."""
        gradient = self._backward_step(*self._under_way.popleft(), upstream, step_id=work.micro)
        if self._matmul.defers:
            self._matmul.end_backward()
        return gradient

    def _fetch_input(self) -> Receive | None:
        if self._is_first:
            return None
        self._p2p_helper._recv_meta()
        tensors, _, tasks = self._start(recv_prev=True)
        return Receive(tensors, tasks)

    def _fetch_upstream(self) -> Receive | None:
        """Start to receive the gradient of this stage's output from the next stage. Returns None on the last
        stage."""
        if self._is_last:
            return None
        _, tensors, tasks = self._start(recv_next=True)
        return Receive(tensors, tasks)

    def _send_output(self, output: Any) -> None:
        if not self._is_last:
            self._p2p_helper._send_meta(output)
            self._send("tensor_send_next", output)

    def _send_gradient(self, gradient: Any) -> None:
        if not self._is_first:
            self._send("tensor_send_prev", gradient)

    def _send(self, direction: str, tensors: Any) -> None:
        self._complete(direction)
        # Send detached tensors, because the pipeline frees the originals while the message is in transit.
        tensors = tuple(tensor.detach() for tensor in tensors)
        _, _, tasks = self._start(**{direction: tensors})
        self._sent[direction] = _Sent(tensors, tasks)

    def _complete(self, direction: str) -> None:
        sent = self._sent.pop(direction, None)
        for task in () if sent is None else sent.tasks:
            task.wait()

    def _start(self, **what: Any) -> tuple[Any, Any, list[Any]]:
        nothing = {"tensor_send_next": None, "tensor_send_prev": None, "recv_prev": False, "recv_next": False}
        return p2p._p2p_helper(
            **{**nothing, **what},
            send_recv_meta=self._p2p_helper._send_recv_meta,
            batch_p2p_comm=False,
            wait_on_reqs=False,
        )


class AsyncPipeline(ListedPipeline):
    """A 1F1B pipeline that overlaps its messages with computation. It needs memory for one more activation
    than a pipeline without this overlap."""

    def __init__(self, model: PipelineLayer, matmul: Matmul) -> None:
        super().__init__(model, matmul)
        # Messages keep the order of Paddle's 1F1B, because the n-th send must match the n-th receive. At most
        # one message per neighbor and direction is in transit.
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


# -- the order of messages in Paddle's own schedules -------------------------------------------------

# A device plugin's library may run messages one after the other, unlike NCCL. Two neighbors that both receive
# first (or both send first) would then deadlock, so one of two neighbors sends first and the other receives
# first, as in Paddle's `_p2p_ops`.
_EVEN = ("send next", "recv prev", "send prev", "recv next")
_ODD = ("recv prev", "send next", "recv next", "send prev")


def take_turns() -> None:
    """Patch Paddle's pipeline schedules so that, in an exchange of messages, stages with even numbers send
    first and stages with odd numbers receive first. On device plugins, neighbors that both send first, or
    both receive first, can deadlock."""
    if not hasattr(p2p.batch_send_recv_on_calc_stream, "in_any_order"):
        batch = p2p.batch_send_recv_on_calc_stream

        def in_turns(messages: Sequence[Any]) -> None:
            batch(ordered(messages, fleet.get_hybrid_communicate_group()))

        in_turns.in_any_order = batch
        p2p.batch_send_recv_on_calc_stream = in_turns


def ordered(messages: Sequence[Any], hcg: Any) -> list[Any]:
    """Return the messages of one exchange in the order in which this rank must start them.

    Args:
        messages: sends and receives. Each has ``op``, the Paddle function to call, and ``peer``, a global
            rank.
        hcg: fleet's hybrid communicate group.
    """
    is_odd = hcg.get_stage_id() % 2 == 1
    order = _ODD if is_odd else _EVEN

    def place(message: Any) -> int:
        what = "send" if message.op is p2p._send_on_calc_stream else "recv"
        next_rank, previous = hcg._get_p2p_next_rank(), hcg._get_p2p_prev_rank()
        # With two stages, the previous and the next rank are the same, so the peer does not give the
        # direction.
        is_previous = message.peer == previous and (next_rank != previous or is_odd)
        return order.index(f"{what} {'prev' if is_previous else 'next'}")

    return sorted(messages, key=place)


Tensors = paddle.Tensor | tuple[paddle.Tensor, ...] | None


def interleave_two_stages(model: PipelineLayer, accumulate_steps: int) -> Any:
    """Build a pipeline with virtual stages on two ranks, which ``fleet.distributed_model`` rejects. The
    schedule is Paddle's interleaved 1F1B. With fewer than four micro batches, all forward passes run first,
    as in Paddle."""
    schedule = _AllForwardFirst if accumulate_steps < 2 * 2 else _Interleaved
    hcg = fleet.get_hybrid_communicate_group()
    return schedule(model, hcg, strategy=fleet.fleet._user_defined_strategy)


class _TwoStages:
    def __init__(self, layers: PipelineLayer, hcg: Any, strategy: Any) -> None:
        super().__init__(layers=layers, hcg=hcg, strategy=strategy)
        assert self._use_batch_p2p_comm, "exchanges that overlap with computation are started in other orders"
        self._p2p_helper = _KindByKind(self._using_cache)

    def _check_sanity(self) -> None:
        assert self.num_stages == 2, "more stages are Paddle's"


class _Interleaved(_TwoStages, PipelineParallelWithInterleave):
    pass


class _AllForwardFirst(_TwoStages, PipelineParallelWithInterleaveFthenB):
    pass


class _KindByKind(p2p.P2pHelper):
    """Paddle's helper for pipeline messages, with one change: an exchange of four messages is split into an
    exchange of gradients and an exchange of activations."""

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensors,
        input_tensor_grad: Tensors,
        recv_prev: bool,
        recv_next: bool,
        batch_p2p_comm: bool = True,
        skip_check_meta: bool = False,
    ) -> tuple[Tensors, Tensors]:
        # Paddle 3.3.1 starts: gradient to the previous rank, activation from it, activation to the next rank,
        # gradient from it. Between two ranks, messages are matched in this order, so a gradient would be
        # received as an activation. tests/parallel/test_pipeline_messages.py checks the rest of the schedule.
        gradient = self.send_backward_recv_backward(
            input_tensor_grad, recv_next=recv_next, batch_p2p_comm=batch_p2p_comm
        )
        activation = self.send_forward_recv_forward(
            output_tensor,
            recv_prev=recv_prev,
            batch_p2p_comm=batch_p2p_comm,
            skip_check_meta=skip_check_meta,
        )
        return activation, gradient
