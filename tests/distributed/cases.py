"""What the ranks run: each operation against NumPy on values every rank can compute for all."""

from __future__ import annotations

import time

import numpy as np
import paddle
import paddle.distributed as dist

from ppfleetx.distributed import cpu_backend

_groups: dict[tuple, object] = {}


def start() -> None:
    if not dist.is_initialized():
        cpu_backend.install()
        dist.init_parallel_env()


def group_of(members: list[int] | None):
    start()
    if members is None:
        return None
    return _groups.setdefault(tuple(members), None) or _remember(members)


def _remember(members):
    _groups[tuple(members)] = dist.new_group(members)
    return _groups[tuple(members)]


def values(dtype: str, rank: int, shape=(5, 3), seed: int = 0) -> np.ndarray:
    """Rank's contribution as float64 (or bool) that the type represents exactly."""
    generator = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return generator.random(shape) < 0.5
    if dtype == "uint8":
        return generator.integers(0, 20, shape).astype(np.float64)
    return generator.integers(-8, 9, shape).astype(np.float64)


def tensor(array: np.ndarray, dtype: str) -> paddle.Tensor:
    if dtype in ("float16", "bfloat16"):
        return paddle.to_tensor(array.astype("float32")).astype(dtype)
    return paddle.to_tensor(array.astype(dtype))


def numpy(value: paddle.Tensor) -> np.ndarray:
    if value.dtype in (paddle.float16, paddle.bfloat16):
        return value.astype("float32").numpy().astype(np.float64)
    result = value.numpy()
    return result if result.dtype == np.bool_ else result.astype(np.float64)


def check(actual: paddle.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(numpy(actual), expected)


REDUCE = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum, "PROD": np.multiply}


def reduced(op: str, parts: list[np.ndarray]) -> np.ndarray:
    if op == "AVG":
        mean = np.sum(parts, axis=0) / len(parts)
        return mean
    total = parts[0]
    for part in parts[1:]:
        total = REDUCE[op](total, part)
    return total


def every_collective(dtype: str, shape: list[int]) -> int:
    start()
    me, n = dist.get_rank(), dist.get_world_size()
    shape = tuple(shape)
    all_values = [values(dtype, r, shape) for r in range(n)]
    mine = lambda: tensor(all_values[me], dtype)  # noqa: E731
    ops = ["SUM", "MAX", "MIN", "PROD"]
    for op in ops:
        parts = [np.clip(v, -2, 2) for v in all_values] if op == "PROD" and dtype != "bool" else all_values
        x = tensor(parts[me], dtype)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        check(x, reduced(op, parts))
        x = tensor(parts[me], dtype)
        dist.reduce(x, dst=n - 1, op=getattr(dist.ReduceOp, op))
        check(x, reduced(op, parts) if me == n - 1 else parts[me])
    gathered: list[paddle.Tensor] = []
    dist.all_gather(gathered, mine())
    for part, expected in zip(gathered, all_values, strict=True):
        check(part, expected)
    whole = tensor(np.zeros((n * shape[0], *shape[1:])), dtype)
    dist.stream.all_gather(whole, mine())
    check(whole, np.concatenate(all_values))
    for source in range(n):
        x = mine()
        dist.broadcast(x, src=source)
        check(x, all_values[source])
    table = [[values(dtype, 10 * r + c, shape) for c in range(n)] for r in range(n)]
    columns = [tensor(v, dtype) for v in table[me]]
    out = tensor(np.zeros(shape), dtype)
    dist.reduce_scatter(out, columns)
    check(out, reduced("SUM", [row[me] for row in table]))
    out = tensor(np.zeros(shape), dtype)
    dist.stream.reduce_scatter(out, paddle.concat(columns) if dtype != "float16" else stacked(table[me], dtype))
    check(out, reduced("SUM", [row[me] for row in table]))
    outs: list[paddle.Tensor] = []
    dist.alltoall(columns, outs) if False else dist.alltoall(outs, columns)
    for r in range(n):
        check(outs[r], table[r][me])
    out = tensor(np.zeros(shape), dtype)
    dist.scatter(out, columns if me == 1 else None, src=1)
    check(out, table[1][me])
    outs = []
    dist.gather(mine(), outs, dst=0)
    if me == 0:
        for part, expected in zip(outs, all_values, strict=True):
            check(part, expected)
    dist.barrier()
    return n


def stacked(parts: list[np.ndarray], dtype: str) -> paddle.Tensor:
    return tensor(np.concatenate(parts), dtype)


def mean(dtype: str) -> None:
    start()
    n = dist.get_world_size()
    parts = [values(dtype, r, (4000,)) * n for r in range(n)]
    x = tensor(parts[dist.get_rank()], dtype)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    check(x, reduced("AVG", parts))


def bits_of_sum(count: int, dtype: str) -> list[int]:
    """Checksum of a sum whose bits depend on the order, and of the order-defined one."""
    start()
    n = dist.get_world_size()
    parts = [np.random.default_rng(r).standard_normal(count).astype("float32") for r in range(n)]
    x = paddle.to_tensor(parts[dist.get_rank()]).astype(dtype)
    originals = [paddle.to_tensor(p).astype(dtype).astype("float32").numpy() for p in parts]
    total = originals[0].copy()
    for part in originals[1:]:
        total += part
    dist.all_reduce(x)
    expected = paddle.to_tensor(total).astype(dtype)
    got, want = (cpu_backend.tensor_array(t).view(np.uint8) for t in (x, expected))
    return [int(np.array_equal(got, want)), int(np.frombuffer(got.tobytes(), np.uint8).astype(np.int64).sum())]


def large_sum_in_half() -> list[float]:
    """30000 + 30000 - 30000: overflows float16 on the way, not in float32."""
    start()
    terms = [30000.0, 30000.0, -30000.0, 0.0]
    x = paddle.to_tensor([terms[dist.get_rank()]]).astype("float16")
    dist.all_reduce(x)
    return x.astype("float32").tolist()


def seconds_all_reduce(megabytes: float, repeats: int) -> list[float]:
    start()
    x = paddle.ones([int(megabytes * (1 << 18))], dtype="float32")
    dist.all_reduce(x)
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - begin)
    return times
