"""The order of pipeline messages on devices that start them one by one.

Paddle's schedules exchange messages with both neighbours at once and leave their order to the library; NCCL
starts such a group of messages together. The library of a plugin's device starts one message after the other.
Then two ranks that both receive first wait for each other forever, as do two ranks that both send first if a
send waits for its receive. Here ranks with even and odd numbers take turns: one of two neighbours sends a
message first, and the other receives it first, also in a ring of pipeline ranks. ``_p2p_ops`` in Paddle's
``p2p_communication.py`` uses the same order for asynchronous messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

_EVEN = ("send next", "recv prev", "send prev", "recv next")
_ODD = ("recv prev", "send next", "recv next", "send prev")


def take_turns() -> None:
    """Make Paddle's pipeline schedules start their messages in the order of :func:`ordered`."""
    if not hasattr(p2p_communication.batch_send_recv_on_calc_stream, "in_any_order"):
        batch = p2p_communication.batch_send_recv_on_calc_stream

        def in_turns(messages: Sequence[Any]) -> None:
            batch(ordered(messages, fleet.get_hybrid_communicate_group()))

        in_turns.in_any_order = batch
        p2p_communication.batch_send_recv_on_calc_stream = in_turns


def ordered(messages: Sequence[Any], hcg: Any) -> list[Any]:
    """The messages of one exchange in this rank's order. Each has an ``op``, Paddle's function that sends
    or receives, and a ``peer``, a global rank; ``hcg`` is fleet's topology."""
    is_odd, order = hcg.get_stage_id() % 2 == 1, _ODD if hcg.get_stage_id() % 2 else _EVEN

    def place(message: Any) -> int:
        what = "send" if message.op is p2p_communication._send_on_calc_stream else "recv"
        next_rank, previous = hcg._get_p2p_next_rank(), hcg._get_p2p_prev_rank()
        # With two stages, both neighbours are one rank: a message sent forwards arrives from behind.
        is_previous = message.peer == previous and (next_rank != previous or is_odd)
        return order.index(f"{what} {'prev' if is_previous else 'next'}")

    return sorted(messages, key=place)
