"""Small runs on the device against the CPU: operators, attention, the same twice, and speeds.

Every function takes the device, so that what it does can be tried on a CPU too; checks run on cards alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import paddle
import paddle.nn.functional as F

from ppfleetx.distributed.device import on_card, on_gpu, queue_copy
from ppfleetx.distributed.tf32 import allow_tf32
from ppfleetx.doctor.case import Case, lacks
from ppfleetx.doctor.gpu import allows_tf32
from ppfleetx.doctor.rows import Row, fail, ok, skipped, warn
from ppfleetx.doctor.storage import words
from ppfleetx.nn.flash import flash_attention, flash_obstacle
from ppfleetx.nn.fused import TABLE, obstacles
from ppfleetx.nn.kernels import KernelOptions, reference_attention

Inputs = Sequence[np.ndarray]
Operator = Callable[..., paddle.Tensor]

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest difference from the CPU's float32, relative to the largest number of the result."""
HEAD_SIZES = (32, 64, 80, 96, 128, 192, 256)
_HALF = ("float16", "bfloat16")
_SLOW_SECONDS = 0.01  # of a product of 1,024: a card in software, on which larger ones would take minutes
_CURE = "this card, its driver or this build of Paddle computes wrongly: try another card, then Paddle 3.3.x"


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def _ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 16, shape)


# What a step is made of: operator, and what it is given. Whole numbers stay whole in every type.
OPERATORS: dict[str, tuple[Operator, Inputs]] = {
    "matmul": (paddle.matmul, (_random(24, 32), _random(32, 40))),
    "batched matmul": (lambda a, b: paddle.matmul(a, b, transpose_y=True), (_random(2, 3, 8, 16),) * 2),
    "linear": (F.linear, (_random(24, 32), _random(32, 40), _random(40))),
    "softmax": (F.softmax, (_random(4, 33),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, 32, w, b), (_random(5, 32), _random(32), _random(32))),
    "gelu": (lambda x: F.gelu(x, approximate=True), (_random(7, 32),)),
    "silu": (F.silu, (_random(7, 32),)),
    "embedding": (lambda table, ids: F.embedding(ids, table), (_random(16, 32), _ids(4, 9))),
    "add": (paddle.add, (_random(7, 32), _random(32))),
    "multiply": (paddle.multiply, (_random(7, 32), _random(32))),
    "mean and rsqrt": (lambda x: x * paddle.rsqrt(x.square().mean(-1, keepdim=True)), (_random(7, 32),)),
    "transpose, strided": (lambda x: x.transpose([1, 0, 2]).reshape([0, -1]) * 2, (_random(3, 5, 8),)),
    "concat and split": (lambda x: paddle.concat(x.chunk(2, axis=-1)[::-1], axis=-1), (_random(5, 32),)),
    "where": (lambda x: paddle.where(x > 0, x, paddle.zeros_like(x)), (_random(5, 32),)),
    "sum": (paddle.sum, (_random(64, 64),)),
    "cross_entropy": (
        lambda x, ids: F.cross_entropy(x.astype("float32"), ids, reduction="none"),
        (_random(9, 16), _ids(9)),
    ),
}


def small_operators(case: Case) -> Iterator[Row]:
    """Each operator in each type of the plan, forward and backward, against the CPU; fused ones as well."""
    types = [dtype for dtype in case.float_types if dtype in TOLERANCE and not lacks(dtype)]
    for dtype in types:
        yield operators_row(dtype, case.device)
    for name, reasons in obstacles(list(TABLE), types).items():
        well = [dtype for dtype, reason in reasons.items() if reason is None]
        others = "; ".join(f"{dtype}: {reason}" for dtype, reason in reasons.items() if reason)
        text = f"gives what plain operators give in {', '.join(well)}" if well else "is not taken"
        yield ok(f"fused {name}", f"{text}{f' ({others})' if others else ''}")


def operators_row(
    dtype: str, device: str, operators: Mapping[str, tuple[Operator, Inputs]] = OPERATORS
) -> Row:
    """All small runs in one type on one device, in products without TF32."""
    wrong, worst = [], 0.0
    allow_tf32(False)
    for name, (operator, inputs) in operators.items():
        expected = _run(operator, inputs, "float32", "cpu")
        found = _run(operator, inputs, dtype, device)
        error = max(_difference(one, other) for one, other in zip(found, expected, strict=True))
        worst = max(worst, error)
        if not error <= TOLERANCE[dtype]:
            wrong.append(f"{name} by {error:.1e}")
    if wrong:
        return fail(
            f"operators {dtype}", f"off from the CPU: {', '.join(wrong)}", _CURE, relative_error=worst
        )
    text = f"{len(operators)} forward and backward: at most {worst:.1e} from the CPU"
    return ok(f"operators {dtype}", text, relative_error=worst)


def _run(operator: Operator, inputs: Inputs, dtype: str, device: str) -> list[np.ndarray]:
    """The result and the gradients of the inputs, as float32."""
    before = paddle.get_device()
    paddle.set_device(device)
    try:
        tensors = [paddle.to_tensor(array) for array in inputs]
        floats = [t.astype(dtype) if t.dtype == paddle.float32 else t for t in tensors]
        for tensor in floats:
            tensor.stop_gradient = tensor.dtype == paddle.int64
        result = operator(*floats)
        weights = paddle.arange(result.size, dtype="float32").reshape(result.shape).cos()
        (result.astype("float32") * weights).sum().backward()
        found = [result, *(tensor.grad for tensor in floats if not tensor.stop_gradient)]
        return [tensor.astype("float32").numpy() for tensor in found]
    finally:
        paddle.set_device(before)


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))


# -- attention -------------------------------------------------------------------------------------


def flash(case: Case) -> Iterator[Row]:
    """Flash attention against the reference over head sizes, types and documents, and what ``auto`` takes."""
    for dtype in case.float_types:
        if dtype not in _HALF or lacks(dtype):
            continue
        for packed in (False, True):
            yield attention_row(dtype, packed=packed)


def attention_row(dtype: str, *, packed: bool, head_sizes: Sequence[int] = HEAD_SIZES) -> Row:
    """All head sizes in one type, with one document in a row or several."""
    name = f"flash {dtype}{', documents' if packed else ''}"
    well, wrong, refused = [], [], {}
    for size in head_sizes:
        query, key, value, start = _attention_inputs(size, dtype, packed=packed)
        dropout = paddle.nn.Dropout(0.0)
        reason = flash_obstacle(query, dropout, packed=packed)
        if reason:
            refused.setdefault(reason, []).append(size)
            continue
        found = flash_attention(query, key, value, start, dropout)
        expected = reference_attention(query, key, value, start, dropout, KernelOptions())
        error = _difference(*(t.astype("float32").numpy() for t in (found, expected)))
        (well if error <= TOLERANCE[dtype] else wrong).append(
            f"{size}" if not wrong else f"{size} ({error:.1e})"
        )
    told = [f"heads of {', '.join(well)} as the reference"] if well else []
    told += [
        f"heads of {', '.join(map(str, sizes))} by the reference: {why}" for why, sizes in refused.items()
    ]
    if wrong:
        cure = "set Model.attention_kernel to reference on these cards"
        return fail(name, f"heads of {', '.join(wrong)} differ from the reference; {'; '.join(told)}", cure)
    return ok(name, "; ".join(told))


def _attention_inputs(size: int, dtype: str, *, packed: bool) -> tuple:
    """``query [b, g, r, q, d]``, ``key``, ``value [b, g, k, d]``: two query heads for each of two others."""
    length = 64
    query = paddle.to_tensor(_random(2, 2, 2, length, size)).astype(dtype)
    key, value = (paddle.to_tensor(_random(2, 2, length, size)).astype(dtype) for _ in range(2))
    start = np.tile(np.where(np.arange(length) < 24, 0, 24).astype(np.int32), (2, 1))
    return query, key, value, paddle.to_tensor(start) if packed else None


# -- the same twice --------------------------------------------------------------------------------


def determinism(case: Case) -> Iterator[Row]:
    """Whether what adds in an order of its own gives the same bits twice."""
    yield repeated_row("embedding gradient", _embedding_gradient, "FLAGS_embedding_deterministic=1")
    if on_gpu():  # the plugins' is tried with the other fused operators
        yield repeated_row("flash gradient", _flash_gradient, "FLAGS_cudnn_deterministic=True")
    yield repeated_row("matrix product", _product, "CUBLAS_WORKSPACE_CONFIG=:4096:8")


def repeated_row(name: str, make: Callable[[], np.ndarray | None], flag: str, times: int = 4) -> Row:
    """Whether ``make`` gives the same bits every time; ``flag`` makes it so."""
    first = make()
    if first is None:
        return skipped(name, "flash attention does not run on this card")
    same = all(np.array_equal(first, make()) for _ in range(times - 1))
    if same:
        return ok(name, f"the same bits {times} times")
    text = "other bits when it is repeated: two runs will not be equal to the last digit"
    return warn(name, text, f"where that matters set {flag} (Global.flags for FLAGS_), which is slower")


def _embedding_gradient() -> np.ndarray:
    table = paddle.to_tensor(_random(16, 256), stop_gradient=False)
    F.embedding(paddle.to_tensor(_ids(4096)), table).multiply(
        paddle.to_tensor(_random(4096, 256))
    ).sum().backward()
    return table.grad.numpy()


def _flash_gradient() -> np.ndarray | None:
    query, key, value, start = _attention_inputs(64, "float16", packed=False)
    dropout = paddle.nn.Dropout(0.0)
    if flash_obstacle(query, dropout, packed=False):
        return None
    query.stop_gradient = False
    flash_attention(query, key, value, start, dropout).astype("float32").sum().backward()
    return query.grad.astype("float32").numpy()


def _product() -> np.ndarray:
    return paddle.matmul(paddle.to_tensor(_random(256, 2048)), paddle.to_tensor(_random(2048, 256))).numpy()


# -- speeds ----------------------------------------------------------------------------------------


def speeds(case: Case) -> Iterator[Row]:
    """Copies between host and card, and matrix products in each type."""
    array = np.zeros(16 << 20, np.float32)
    told = {
        "to the card": array.nbytes / seconds_of(lambda: paddle.to_tensor(array)),
        "to the card, queued": array.nbytes / seconds_of(lambda: queue_copy(array)),
    }
    there = paddle.to_tensor(array)
    told["to the host"] = array.nbytes / seconds_of(lambda: there.cpu())
    text = ", ".join(f"{words(speed)}/s {way}" for way, speed in told.items())
    yield ok("copies", text, **{f"bytes_per_second {way}": speed for way, speed in told.items()})
    allow_tf32(allows_tf32(case))  # as fast as the run will be
    small = paddle.ones([1024, 1024])
    size = 4096 if seconds_of(lambda: paddle.matmul(small, small), 1) < _SLOW_SECONDS else 512
    for dtype in case.float_types:
        if dtype != "float64" and not lacks(dtype):
            yield product_row(dtype, size)
    allow_tf32(False)


def product_row(dtype: str, size: int) -> Row:
    """Matrix products of ``size`` in a type, in TFLOP/s."""
    one = paddle.ones([size, size], dtype)
    rate = 2 * size**3 / seconds_of(lambda: paddle.matmul(one, one)) / 1e12
    return ok(f"matmul {dtype}", f"{rate:.2f} TFLOP/s at {size:,}", tflops=rate)


def seconds_of(run: Callable[[], object], times: int = 5) -> float:
    """Of one call, with the device's work done; a first one warms up."""

    def wait() -> None:
        if on_card():
            paddle.device.synchronize()

    run()
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - begin) / times
