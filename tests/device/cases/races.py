"""In a rank: a training from which something that orders streams is taken away.

What is taken away is named by the function of this project that does it, not by a line; a name that no longer
exists, or is not come to, is an error.
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import paddle
from paddle import distributed

from tests.device.cases.training import engine_steps
from tests.device.reference import Device
from tests.parity.low_precision import state_digest
from tests.parity.training import build

Reached = Counter[str]


class _Done:
    """An event that says at once that all is done."""

    def query(self) -> bool:
        return True


def _no_wait(where: str) -> Callable[[Reached], Any]:
    """The function ``where`` does not wait for its collectives."""

    def change(reached: Reached) -> Any:
        task = paddle.base.core.task
        wait = task.wait

        def wait_elsewhere(self: Any, *arguments: Any) -> Any:
            if sys._getframe(1).f_code.co_qualname != where:
                return wait(self, *arguments)
            reached[where] += 1
            return True

        return mock.patch.object(task, "wait", wait_elsewhere)

    return change


def _instead(target: str, make: Callable[[Any, Reached], Any]) -> Callable[[Reached], Any]:
    """``module:name`` or ``module:Class.name`` is what ``make`` makes of it."""

    def change(reached: Reached) -> Any:
        return mock.patch(target.replace(":", "."), make(pkgutil.resolve_name(target), reached))

    return change


def _nothing(_: Any, reached: Reached) -> Callable[..., None]:
    return lambda *_, **__: reached.update(["nothing"])


def _done_in(where: str) -> Callable[[Any, Reached], Any]:
    def make(original: Any, reached: Reached) -> Callable[[], Any]:
        def event() -> Any:
            if sys._getframe(1).f_code.co_qualname != where:
                return original()
            reached[where] += 1
            return _Done()

        return event

    return make


def _forgets_source(original: Any, reached: Reached) -> Callable[..., Any]:
    def queue_copy(array: Any) -> tuple[Any, None]:
        reached["source"] += 1
        return original(array)[0], None

    return queue_copy


def _not_blocking(_: Any, reached: Reached) -> Callable[..., Any]:
    def copy_to_host(tensor: Any) -> Any:
        reached["copy"] += 1
        return tensor.detach()._copy_to(paddle.CPUPlace(), False)

    return copy_to_host


def _other_order(original: Any, reached: Reached) -> Callable[..., Any]:
    """Odd ranks send the packed sums of a step's end in another order than even ones."""

    def packed(tensors: Any, start: Any) -> None:
        tensors = list(tensors)
        reached["packed"] += 1
        return original(tensors[::-1] if distributed.get_rank() % 2 else tensors, start)

    return packed


def _two_groups(original: Any, reached: Reached) -> Callable[..., Any]:
    """Odd tensor-parallel ranks make their copies equal before they sum over the replicas, not after."""

    def reduce(self: Any) -> None:
        from ppfleetx.distributed.collectives import equalize_packed
        from ppfleetx.parallel import grad_sync

        ctx = self._ctx
        whole = grad_sync._gradients([p for p in self.parameters if p.info.is_whole])
        is_odd = ctx.rank_on("mp") % 2
        reached["reduce"] += 1
        if is_odd:
            equalize_packed(whole, ctx.group_of("mp"))
        skipped = mock.patch.object(grad_sync, "equalize_packed", lambda *_: None)
        with skipped if is_odd else contextlib.nullcontext():
            original(self)

    return reduce


def _asynchronous(name: str) -> Callable[[Any, Reached], Any]:
    """A function that waits for one collective, ``distributed.<name>``, does not."""

    def make(original: Any, reached: Reached) -> Callable[..., Any]:
        place = f"paddle.distributed.{name}"
        collective = pkgutil.resolve_name(place)

        def start(*arguments: Any, **options: Any) -> Any:
            reached[name] += 1
            return collective(*arguments, **{**options, "sync_op": False})

        def call(*arguments: Any, **options: Any) -> Any:
            with mock.patch(place, start):
                return original(*arguments, **options)

        return call

    return make


def _forgets_sent(original: Any, reached: Reached) -> Callable[..., Any]:
    def sent(tensors: Any, tasks: Any) -> Any:
        reached["sent"] += 1
        return original((), tasks)

    return sent


def _forgets_used(original: Any, reached: Reached) -> Callable[..., Any]:
    def finish(task: Any, result: Any, *used: Any) -> Any:
        reached["used"] += len(used)
        return original(task, result)

    return finish


CHANGES: dict[str, Callable[[Reached], Any]] = {
    "nothing": lambda reached: contextlib.nullcontext(reached.update(["nothing"])),
    **{
        f"no wait in {where}": _no_wait(where)
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
        "ppfleetx.parallel.grad_sync:GradientSync.finish_values", _nothing
    ),
    "a copy to the host is read at once": _instead(
        "ppfleetx.distributed.host_device_copy:recorded_event", _done_in("download")
    ),
    "the source of a copy is let go": _instead(
        "ppfleetx.distributed.host_device_copy:queue_copy", _forgets_source
    ),
    "offload does not wait for gradients": _instead("ppfleetx.optims.optimizer:copy_to_host", _not_blocking),
    "one group, two orders": _instead("ppfleetx.distributed.collectives:_packed", _other_order),
    "two groups, two orders": _instead("ppfleetx.parallel.grad_sync:GradientSync.reduce", _two_groups),
    "sum_gathered does not wait": _instead(
        "ppfleetx.distributed.collectives:sum_gathered", _asynchronous("stream.all_gather")
    ),
    "all-to-all does not wait": _instead(
        "ppfleetx.distributed.collectives:_all_to_all", _asynchronous("alltoall_single")
    ),
    "what is sent is let go": _instead("ppfleetx.parallel.pipeline_schedules:_Sent", _forgets_sent),
    "what is summed is let go": _instead("ppfleetx.nn.matmul:_finish", _forgets_used),
}


@contextlib.contextmanager
def _changed(change: str, options: Mapping[str, int]) -> Iterator[Reached]:
    reached: Reached = Counter()
    with Device().having(options), CHANGES[change](reached):
        yield reached


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
    with paddle.utils.unique_name.guard(), _changed(change, options) as reached:
        cfg, ctx, runner = build(plan, world_size, model, "adamw", micro_batch_size, extra)
        runner.checks = "off"  # what is not finite is noticed by the test
        take, numbers = engine_steps(cfg, ctx, runner), []
        for step in range(steps):
            output = take(step)
            numbers.append(f"{output.loss} {output.grad_norm}")
        numbers.append(str(state_digest(runner)))
        paddle.device.synchronize()
    return {"numbers": numbers, "reached": reached.total()}
