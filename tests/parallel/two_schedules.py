"""Short trainings of one plan with 1F1B and ZB-H1, or with different keys (called in every rank)."""

from __future__ import annotations

import contextlib
import hashlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.parity.training import build, micro_batches, take_step

STEPS = 2


def compare(
    plan: dict[str, Any], world_size: int, model: str, micro_batch_size: int, extra: dict[str, Any]
) -> dict[str, Any]:
    """Numbers of a short training in each order.

    Returns:
        ``1f1b`` and ``zb_h1``: losses, gradient norms and a digest of the last weights; ``most``: in ZB-H1,
        the largest number of micro batches between F and B, between B and W, and of both together.
    """
    found: dict[str, Any] = {}
    for schedule in ("1f1b", "zb_h1"):
        found[schedule], most = _train(
            {**plan, "pp_schedule": schedule}, world_size, model, micro_batch_size, extra
        )
    return {**found, "most": most}


def with_keys(
    plan: dict[str, Any], world_size: int, model: str, extra: dict[str, Any], keys: list[dict[str, Any]]
) -> list[list[Any]]:
    """Losses, gradient norms and a digest of the last weights with each of ``keys``; 16-bit types are
    emulated."""
    return [_train(plan, world_size, model, 4, {**extra, **more})[0] for more in keys]


def uses(plan: dict[str, Any], world_size: int, extra: dict[str, Any]) -> dict[str, Any]:
    """Run a step in 16 bits with every fused product that the configuration can use.

    Returns ``taken``, the operators in use; ``said``, those in the log; ``used``, how often each option of a
    product took effect.
    """
    import paddle

    from ppfleetx.nn import fused_ops
    from tests.helpers.low_precision import emulated
    from tests.parity.option_pairs import FUSED, fused_products, matmuls

    lines: list[str] = []
    logger = SimpleNamespace(info=lines.append)
    with (
        paddle.utils.unique_name.guard(),
        emulated(),
        fused_products(),
        mock.patch.object(fused_ops, "get_logger", lambda: logger),
        matmuls() as made,
    ):
        cfg, ctx, runner = build(plan, world_size, "gpt", "sgd", 4, extra)
        take_step(runner, 0, cfg, ctx)
    (matmul,) = made
    return {
        "taken": sorted(runner._sync.ops.taken),
        "said": [name for name in FUSED.values() if any(name in line for line in lines)],
        "used": +matmul.uses,
    }


def _train(
    plan: dict[str, Any], world_size: int, model: str, micro_batch_size: int, extra: dict[str, Any]
) -> tuple[list[Any], list[int]]:
    import paddle

    from tests.helpers.low_precision import emulated

    kernels = emulated() if extra.get("Engine.mix_precision.enable") else contextlib.nullcontext()
    with paddle.utils.unique_name.guard(), kernels:
        cfg, ctx, runner = build(plan, world_size, model, "sgd", micro_batch_size, extra)
        most = _watch(runner._pipeline) if plan.get("pp_schedule") == "zb_h1" else []
        outputs = [take_step(runner, step, cfg, ctx) for step in range(STEPS)]
        evaluated = runner.eval_step(micro_batches(STEPS, cfg, ctx))
        weights = hashlib.sha256()
        for _, parameter in sorted(runner.named_parameters(), key=lambda one: one[0]):
            weights.update(parameter.astype("float32").numpy().tobytes())
    numbers = [
        evaluated.loss / evaluated.count,
        *(number for o in outputs for number in (o.loss, o.grad_norm)),
    ]
    return [numbers, weights.hexdigest()], most


def _watch(pipeline: Any) -> list[int]:
    """Record the largest numbers of micro batches in progress."""
    most, flying, matmul = [0, 0, 0], [0], pipeline._matmul
    forward, end_backward = pipeline._forward_step, matmul.end_backward

    def count() -> None:
        waiting = len(matmul._waiting)
        for place, number in enumerate((flying[0], waiting, flying[0] + waiting)):
            most[place] = max(most[place], number)

    def counted_forward(*args: Any, **kwargs: Any) -> Any:
        if pipeline._layers.training:
            flying[0] += 1
            count()
        return forward(*args, **kwargs)

    def counted_end() -> None:
        end_backward()
        flying[0] -= 1
        count()

    pipeline._forward_step, matmul.end_backward = counted_forward, counted_end
    return most
