"""In a rank: a training from which something that orders streams is taken away.

What is taken away is named by the function of this project that does it, not by a line; a name that no longer
exists, or is not come to, is an error.
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import paddle
from paddle import distributed

from tests.device.cases.training import engine_steps
from tests.device.reference import Device
from tests.parity.low_precision import state_digest
from tests.parity.training import build

Reached = Counter[str]
Change = Callable[[Reached], Any]


class _Done:
    """An event that says at once that all is done."""

    def query(self) -> bool:
        return True


def _instead(target: str, act: Callable[..., Any], where: str = "") -> Change:
    """``act`` is called in the place of ``module:name`` or ``module:Class.name``, its first argument; with
    ``where`` only when the function of this name calls."""

    def change(reached: Reached) -> Any:
        original = pkgutil.resolve_name(target)

        def call(*arguments: Any, **options: Any) -> Any:
            if where and sys._getframe(1).f_code.co_qualname != where:
                return original(*arguments, **options)
            reached[target] += 1
            return act(original, *arguments, **options)

        return mock.patch(target.replace(":", "."), call)

    return change


def _other_order(original: Any, tensors: Any, start: Any) -> None:
    """Odd ranks send the packed sums of a step's end in another order than even ones."""
    tensors = list(tensors)
    return original(tensors[::-1] if distributed.get_rank() % 2 else tensors, start)


def _two_groups(original: Any, sync: Any) -> None:
    """Odd tensor-parallel ranks make their copies equal before they sum over the replicas, not after."""
    from ppfleetx.distributed.collectives import equalize_packed
    from ppfleetx.parallel import grad_sync

    ctx = sync._ctx
    whole = grad_sync._gradients([p for p in sync.parameters if p.info.is_whole])
    is_odd = ctx.rank_on("mp") % 2
    if is_odd:
        equalize_packed(whole, ctx.group_of("mp"))
    skipped = mock.patch.object(grad_sync, "equalize_packed", lambda *_: None)
    with skipped if is_odd else contextlib.nullcontext():
        original(sync)


def _asynchronous(function: str, name: str) -> Change:
    """A function that waits for one collective, ``distributed.<name>``, does not."""
    collective = f"paddle.distributed.{name}"

    def act(original: Any, *arguments: Any, **options: Any) -> Any:
        start = pkgutil.resolve_name(collective)

        def started(*given: Any, **named: Any) -> Any:
            return start(*given, **{**named, "sync_op": False})

        with mock.patch(collective, started):
            return original(*arguments, **options)

    return _instead(function, act)


CHANGES: dict[str, Change] = {
    "nothing": lambda reached: contextlib.nullcontext(reached.update(["nothing"])),
    **{
        f"no wait in {where}": _instead("paddle.base.core:task.wait", lambda *_: True, where)
        for where in (
            "BucketSums._complete",
            "Sharding._complete",
            "Receive.wait",
            "ListedPipeline._complete",
            "ParamBroadcast.finish",
            "ParamBroadcast._before_forward",
            "_Fetch.complete",
            "_finish.<locals>.finish",
            "Packed.complete",
        )
    },
    "values are read before they have come": _instead(
        "ppfleetx.parallel.grad_sync:GradientSync.finish_values", lambda *_: None
    ),
    "a copy to the host is read at once": _instead(
        "ppfleetx.distributed.host_device_copy:recorded_event", lambda _: _Done(), "download"
    ),
    "the source of a copy is let go": _instead(
        "ppfleetx.distributed.host_device_copy:queue_copy", lambda copy, array: (copy(array)[0], None)
    ),
    "offload does not wait for gradients": _instead(
        "ppfleetx.optims.optimizer:copy_to_host",
        lambda _, tensor: tensor.detach()._copy_to(paddle.CPUPlace(), False),
    ),
    "one group, two orders": _instead("ppfleetx.distributed.collectives:_packed", _other_order),
    "two groups, two orders": _instead("ppfleetx.parallel.grad_sync:GradientSync.reduce", _two_groups),
    "sum_gathered does not wait": _asynchronous(
        "ppfleetx.distributed.collectives:sum_gathered", "stream.all_gather"
    ),
    "all-to-all does not wait": _asynchronous(
        "ppfleetx.distributed.collectives:_all_to_all", "alltoall_single"
    ),
    "what is sent is let go": _instead(
        "ppfleetx.parallel.pipeline_schedules:_Sent", lambda sent, _, tasks: sent((), tasks)
    ),
    "what is summed is let go": _instead(
        "ppfleetx.nn.matmul:_finish", lambda finish, task, result, *_: finish(task, result)
    ),
}


def train(
    change: str,
    options: Mapping[str, int],
    plan: Mapping[str, Any],
    world_size: int,
    micro_batch_size: int,
    extra: Mapping[str, Any],
    steps: int = 3,
    model: str = "gpt",
) -> dict[str, Any]:
    """Losses and gradient norms of a few steps, and a digest of all state behind them, as texts, in which NaN
    equals itself; and how often the change was come to."""
    reached: Reached = Counter()
    with paddle.utils.unique_name.guard(), Device().having(options), CHANGES[change](reached):
        cfg, ctx, runner = build(plan, world_size, model, "adamw", micro_batch_size, extra)
        runner.checks = "off"  # what is not finite is noticed by the test
        take, numbers = engine_steps(cfg, ctx, runner), []
        for step in range(steps):
            output = take(step)
            numbers.append(f"{output.loss} {output.grad_norm}")
        numbers.append(str(state_digest(runner)))
        paddle.device.synchronize()
    return {"numbers": numbers, "reached": reached.total()}
