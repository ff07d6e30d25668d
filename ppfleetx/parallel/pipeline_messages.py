"""The order of pipeline messages, for two cases in which Paddle's own order would deadlock or mix up
messages: device plugins (:func:`take_turns`), and virtual stages on two ranks
(:func:`interleave_two_stages`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import (
    PipelineLayer,
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
)
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

# A device plugin's library may run messages one after the other, unlike NCCL. Two neighbors that both receive
# first (or both send first) would then deadlock, so one of two neighbors sends first and the other receives
# first, as in Paddle's `_p2p_ops`.
_EVEN = ("send next", "recv prev", "send prev", "recv next")
_ODD = ("recv prev", "send next", "recv next", "send prev")


def take_turns() -> None:
    """Patch Paddle's pipeline schedules so that, of two neighbors that exchange messages, one sends first and
    the other receives first. If both did the same first, they could deadlock on device plugins."""
    if not hasattr(p2p_communication.batch_send_recv_on_calc_stream, "in_any_order"):
        batch = p2p_communication.batch_send_recv_on_calc_stream

        def in_turns(messages: Sequence[Any]) -> None:
            batch(ordered(messages, fleet.get_hybrid_communicate_group()))

        in_turns.in_any_order = batch
        p2p_communication.batch_send_recv_on_calc_stream = in_turns


def ordered(messages: Sequence[Any], hcg: Any) -> list[Any]:
    """Return the messages of one exchange in the order in which this rank must start them.

    Args:
        messages: each has ``op``, Paddle's function that sends or receives, and ``peer``, a global rank.
        hcg: fleet's hybrid communicate group.
    """
    is_odd, order = hcg.get_stage_id() % 2 == 1, _ODD if hcg.get_stage_id() % 2 else _EVEN

    def place(message: Any) -> int:
        what = "send" if message.op is p2p_communication._send_on_calc_stream else "recv"
        next_rank, previous = hcg._get_p2p_next_rank(), hcg._get_p2p_prev_rank()
        # With two stages, both neighbors are the same rank, so that the peer does not tell the direction.
        is_previous = message.peer == previous and (next_rank != previous or is_odd)
        return order.index(f"{what} {'prev' if is_previous else 'next'}")

    return sorted(messages, key=place)


Tensors = paddle.Tensor | tuple[paddle.Tensor, ...] | None


def interleave_two_stages(model: PipelineLayer, accumulate_steps: int) -> Any:
    """Build a pipeline with virtual stages on two ranks, which ``fleet.distributed_model`` rejects. The
    schedule is Paddle's interleaved 1F1B; with fewer than four micro batches, all forward passes run
    first."""
    # As in Paddle, all forward passes run first if there are fewer than four micro batches.
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


class _KindByKind(p2p_communication.P2pHelper):
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
        # received as an activation. tests/parallel/test_two_stages.py checks the rest of the schedule.
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
