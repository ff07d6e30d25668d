"""Virtual stages on a pipeline of two ranks, which Paddle's interleaved schedule refuses (``pp degree > 2``).

With two ranks, the previous and the next rank are the same. Where the schedule sends and receives in all four
directions at once, Paddle (3.3.1) starts the messages in this order: gradient to the previous rank,
activation from it, activation to the next rank, gradient from it. NCCL and our CPU groups match the messages
of a pair of ranks in the order of their start, so the peer's gradient, sent first, would be received as its
activation. Both have the same shape, so the mistake would go unnoticed. The schedule itself is right for two
ranks; only these four messages must be matched. Here they become two exchanges, gradients and then
activations, in the same order on all ranks, so that each receive gets the right kind.

``tests/parallel/test_two_stages.py`` checks that no other message of the schedule can be mistaken, and that
the messages cannot deadlock if a send waits for its receive, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import (
    PipelineLayer,
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
)
from paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication import P2pHelper

Tensors = paddle.Tensor | tuple[paddle.Tensor, ...] | None


def interleave_two_stages(model: PipelineLayer, accumulate_steps: int) -> Any:
    """Build a pipeline with virtual stages on two ranks, in place of ``fleet.distributed_model``. With
    fewer micro batches than twice the number of ranks, all forward passes come first, as in Paddle."""
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


class _KindByKind(P2pHelper):
    """Pipeline messages that split a four-way exchange: gradients first, activations second."""

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensors,
        input_tensor_grad: Tensors,
        recv_prev: bool,
        recv_next: bool,
        batch_p2p_comm: bool = True,
        skip_check_meta: bool = False,
    ) -> tuple[Tensors, Tensors]:
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
