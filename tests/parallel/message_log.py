"""Record the messages that pipeline ranks start, in order (called in every rank)."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.parity.training import build, micro_batches, take_step

Messages = list[list[str]]
"""Groups of messages started together, each ``send`` or ``recv`` and what it is meant to carry."""


def messages(
    plan: dict[str, Any], world_size: int, micro_batch_size: int, paddles_order: bool = False
) -> Messages:
    """Messages of an evaluation and a training step; with ``paddles_order``, Paddle's helper replaces
    ours."""
    import paddle
    from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as p2p

    log: Messages = []
    exchange = p2p._batched_p2p_ops

    def logged_exchange(send_prev: Any, recv_prev: Any, send_next: Any, recv_next: Any, hcg: Any) -> None:
        # Sends and receives in the order in which Paddle starts them.
        directions = [
            ("send gradient", send_prev),
            ("recv activation", recv_prev),
            ("send activation", send_next),
            ("recv gradient", recv_next),
        ]
        log.append([what for what, tensors in directions if tensors is not None])
        exchange(send_prev, recv_prev, send_next, recv_next, hcg)

    def logged_meta(way: str) -> Any:
        act = getattr(p2p.SendRecvMeta, f"{way}_meta")

        def logged(*args: Any, **kwargs: Any) -> None:
            log.extend([[f"{way} size"], [f"{way} shape"]])
            act(*args, **kwargs)

        return mock.patch.object(p2p.SendRecvMeta, f"{way}_meta", logged)

    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build(plan, world_size, "gpt", "sgd", micro_batch_size, {})
        if paddles_order:
            runner._pipeline._p2p_helper = p2p.P2pHelper(use_cache=True)
        logged = mock.patch.object(p2p, "_batched_p2p_ops", logged_exchange)
        with logged, logged_meta("send"), logged_meta("recv"):
            runner.eval_step(micro_batches(0, cfg, ctx))
            take_step(runner, 0, cfg, ctx)
    return [group for group in log if group]


def starts(
    plan: dict[str, Any], world_size: int, micro_batch_size: int, extra: dict[str, Any]
) -> list[tuple[str, str]]:
    """The messages of the second training step, in order: (``send`` or ``recv``, ``prev`` or ``next``
    neighbor). Shapes are exchanged only in the first step."""
    import paddle
    from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as p2p

    log: list[tuple[str, str]] = []
    start = p2p._p2p_ops

    def logged(send_prev: Any, recv_prev: Any, send_next: Any, recv_next: Any, hcg: Any) -> Any:
        what = {
            ("recv", "prev"): recv_prev,
            ("send", "prev"): send_prev,
            ("send", "next"): send_next,
            ("recv", "next"): recv_next,
        }
        log.extend(key for key, tensors in what.items() if tensors is not None)
        return start(send_prev, recv_prev, send_next, recv_next, hcg)

    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build(plan, world_size, "gpt", "sgd", micro_batch_size, extra)
        take_step(runner, 0, cfg, ctx)
        with mock.patch.object(p2p, "_p2p_ops", logged):
            take_step(runner, 1, cfg, ctx)
    return log
