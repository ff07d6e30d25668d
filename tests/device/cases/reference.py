"""In a rank: what the reference device does, seen through Paddle."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist

from tests.device.reference import NAME, Device


def _begin() -> Device:
    paddle.set_device(NAME)
    paddle.zeros([1]).numpy()  # makes the compute stream
    device = Device()
    device.clear()
    return device


def _join() -> int:
    if not dist.is_initialized():
        dist.init_parallel_env()
    return dist.get_rank()


def launching_and_waiting(delay_us: int, count: int) -> dict[str, Any]:
    """Seconds that launching ``count`` kernels took, and waiting for them; the result, and the counters."""
    device = _begin()
    device.set("kernel_delay_us", delay_us)
    x = paddle.ones([8])
    begin = time.perf_counter()
    for _ in range(count):
        x = x + 1.0
    launched = time.perf_counter()
    paddle.device.synchronize()
    waited = time.perf_counter()
    counters = device.counters()
    return {
        "launching": launched - begin,
        "waiting": waited - launched,
        "result": x.tolist(),
        "counters": counters,
    }


def too_much_memory(limit: int) -> dict[str, Any]:
    """What Paddle raises for a tensor that does not fit, and whether the next one that does is right."""
    device = _begin()
    device.set("memory", device.used + limit)
    try:
        paddle.ones([limit]).numpy()
        said = ""
    except MemoryError as error:
        said = str(error)
    return {"said": said, "then": paddle.ones([3]).tolist()}


def streams(waits: bool, delay_us: int) -> list[float]:
    """A sum that a stream of its own makes late, read by the compute stream with and without a wait."""
    device = _begin()
    side, ready = paddle.device.Stream(), paddle.device.Event()
    x = paddle.full([4], 3.0)
    total = paddle.zeros([4])
    paddle.device.synchronize()
    device.set("kernel_delay_us", delay_us)
    with paddle.device.stream_guard(side):
        total.add_(x)
        ready.record(side)
    device.set("kernel_delay_us", 0)
    if waits:
        paddle.device.current_stream().wait_event(ready)
    return (total * 1.0).tolist()


def asynchronous_sum(waits: bool, delay_us: int) -> list[float]:
    """An ``all_reduce`` beside the compute stream, read with and without ``wait``."""
    _join()
    device = _begin()
    x = paddle.full([4], float(dist.get_rank() + 1))
    dist.all_reduce(paddle.zeros([1]))  # makes the communicator
    paddle.device.synchronize()
    device.set("collective_delay_us", delay_us)
    task = dist.all_reduce(x, sync_op=False)
    if waits:
        task.wait()
    found = (x * 1.0).tolist()
    paddle.device.synchronize()
    return found


def freed_too_early(keeps: bool) -> list[float]:
    """A tensor that another stream still reads, late, is dropped, and its memory used again."""
    device = _begin()
    side = paddle.device.Stream()
    x, total = paddle.full([1024], 3.0), paddle.zeros([1024])
    kept = [x] if keeps else []
    paddle.device.synchronize()
    device.set("kernel_delay_us", 50_000)
    with paddle.device.stream_guard(side):
        total.add_(x)
    device.set("kernel_delay_us", 0)
    del x
    other = paddle.full([1024], 7.0)
    paddle.device.synchronize()
    return [total[0].item(), other[0].item(), float(len(kept))]


def used_again_on_another_stream(times: int) -> int:
    """How often memory that nobody uses any more, given out for another stream while the compute stream is
    idle, does not keep what that stream writes."""
    _begin()
    side, lost = paddle.device.Stream(), 0
    for _ in range(times):
        x = paddle.full([1 << 20], 3.0)
        paddle.device.synchronize()
        del x
        with paddle.device.stream_guard(side):
            other = paddle.full([1 << 20], 7.0)
        paddle.device.synchronize()
        lost += not bool((other == 7.0).all())
    return lost


def _said(call: Any) -> str:
    try:
        call()
        paddle.device.synchronize()
        return ""
    except (OSError, RuntimeError) as error:
        return type(error).__name__


def different_operations() -> str:
    """Rank 0 sums, rank 1 sends its values; the error is in the log of the rank."""
    rank = _join()
    _begin()
    x = paddle.ones([4])
    return _said(lambda: dist.all_reduce(x) if rank == 0 else dist.broadcast(x, src=1))


def both_send_first() -> str:
    """Two ranks that send before they receive."""
    rank = _join()
    _begin()
    x, y = paddle.full([4], float(rank)), paddle.zeros([4])

    def exchange() -> None:
        dist.send(x, dst=1 - rank, sync_op=False)
        dist.recv(y, src=1 - rank, sync_op=False).wait()
        assert y.tolist() == [1.0 - rank] * 4

    return _said(exchange)


def reductions(dtypes: list[str]) -> list[str]:
    """``all_reduce`` of each type: "" and the right sum, or the error's name."""
    _join()
    _begin()

    def call(dtype: str) -> None:
        x = paddle.ones([4], dtype)
        dist.all_reduce(x)
        assert x.astype("float32").tolist() == [float(dist.get_world_size())] * 4

    return [_said(partial(call, dtype)) for dtype in dtypes]


def failing_kernel() -> list[str]:
    """What the host gets when it waits for a device that has failed, now and later."""
    device = _begin()
    device.set("fail_kernel", 3)

    def compute() -> None:
        x = paddle.ones([4])
        for _ in range(5):
            x = x + 1.0

    return [_said(compute), _said(lambda: None)]


def not_registered() -> list[str]:
    """Of the kernels that plans use (``ppfleetx/utils/gpu_operators.json``) and their types, those that the
    device has not, neither of its own nor of Paddle's for every plugin's device."""
    from ppfleetx.utils.gpu_operators import registered_types, used_kernels

    registry = paddle.base.core._get_registered_phi_kernels("function")
    return [
        f"{kernel} {dtype}"
        for kernel, known in used_kernels().items()
        for dtype in known.used
        if dtype not in registered_types(registry.get(kernel, ()), (NAME, "CUSTOM"))
    ]
