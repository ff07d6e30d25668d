"""Each operation compared with NumPy, on values that every rank can compute for all ranks (called in every
rank)."""

from __future__ import annotations

import time
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist

from ppfleetx.distributed.cpu import backend as cpu_backend
from ppfleetx.distributed.cpu.arrays import TensorMemory, tensor_array
from ppfleetx.distributed.cpu.wire import CommError
from ppfleetx.distributed.device import on_card

_groups: dict[tuple, object] = {}


def start() -> None:
    if not dist.is_initialized():
        if not on_card():
            cpu_backend.install()
        dist.init_parallel_env()


def group_of(members: list[int]):
    """The group of these ranks, created once per process, by all ranks in the same order."""
    start()
    if tuple(members) not in _groups:
        _groups[tuple(members)] = dist.new_group(members)
    return _groups[tuple(members)]


def values(dtype: str, rank: int, shape=(5, 3), seed: int = 0) -> np.ndarray:
    """A rank's contribution as float64 (or bool), exact in the given type."""
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
        # Of factors up to 2 the product of four ranks fits every type, that of eight none of 8 bits.
        least = 1 if n > 4 else 2
        clips = op == "PROD" and dtype != "bool"
        parts = [np.clip(v, -least, least) for v in all_values] if clips else all_values
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
    dist.stream.reduce_scatter(out, tensor(np.concatenate(table[me]), dtype))
    check(out, reduced("SUM", [row[me] for row in table]))
    outs: list[paddle.Tensor] = []
    dist.alltoall(outs, columns)
    for r in range(n):
        check(outs[r], table[r][me])
    out = tensor(np.zeros(shape), dtype)
    dist.scatter(out, columns if me == 1 else None, src=1)
    check(out, table[1][me])
    parts = [part.clone() for part in columns]
    dist.scatter(parts[0], parts if me == 1 else None, src=1)  # into one of the parts
    check(parts[0], table[1][me])
    outs = []
    dist.gather(mine(), outs, dst=0)
    if me == 0:
        for part, expected in zip(outs, all_values, strict=True):
            check(part, expected)
    dist.barrier()
    return n


def bits_of_sum(count: int, dtype: str) -> list[int]:
    """Whether an order-dependent sum equals the sum in rank order, and its checksum."""
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
    got, want = (tensor_array(t).view(np.uint8) for t in (x, expected))
    return [
        int(np.array_equal(got, want)),
        int(np.frombuffer(got.tobytes(), np.uint8).astype(np.int64).sum()),
    ]


def all_to_all_of_unequal_parts() -> None:
    """Rank r sends 2 r + c + 1 rows to rank c, so it receives another number of rows than it sends."""
    start()
    me, n = dist.get_rank(), dist.get_world_size()
    part = lambda r, c: np.full((2 * r + c + 1, 2), 10 * r + c, "float32")  # noqa: E731
    taken, given = ([2 * r + me + 1 for r in range(n)], [2 * me + c + 1 for c in range(n)])
    out = paddle.zeros([sum(taken), 2])
    source = paddle.to_tensor(np.concatenate([part(me, c) for c in range(n)]))
    dist.alltoall_single(out, source, given, taken)
    check(out, np.concatenate([part(r, me) for r in range(n)]).astype(np.float64))


def strided_refused() -> list[str]:
    """Operations that accept a transposed view as input or output although NCCL refuses it."""
    start()
    me, n = dist.get_rank(), dist.get_world_size()
    group = dist.get_group().process_group

    def strided(rows: int = n) -> paddle.Tensor:
        return paddle.ones([3, rows]).t()

    part, peer = paddle.ones([1, 3]), (me + 1) % n
    operations = {
        "all_reduce": lambda: dist.all_reduce(strided()),
        "all_gather into": lambda: dist.stream.all_gather(strided(), part),
        "alltoall of a list": lambda: dist.alltoall([], [strided()] * n),
        "send": lambda: dist.isend(strided(), dst=peer),
        "recv": lambda: dist.irecv(strided(), src=peer),
        "a part sent by a pipeline": lambda: group.send_partial_on_calc_stream(strided(), peer, n, me),
    }
    taken = []
    for name, run in operations.items():
        try:
            run()
            taken.append(name)
        except CommError as error:
            if "a strided tensor of shape" not in str(error) or "NCCL refuses" not in str(error):
                raise
    return taken


def strided() -> None:
    """Transposed views are read and written in place, without touching other memory."""
    start()
    n = dist.get_world_size()
    with mock.patch.object(TensorMemory, "takes_strided", True):
        _strided(n)


def _strided(n: int) -> None:
    base = paddle.arange(24, dtype="float32").reshape([2, 3, 4])
    view = base.transpose([2, 0, 1])
    assert not view.is_contiguous()
    dist.all_reduce(view)
    check(view, np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1) * n)
    check(base, np.arange(24.0).reshape(2, 3, 4) * n)
    received = paddle.zeros([3, 2]).t()
    dist.broadcast(received if dist.get_rank() else paddle.ones([2, 3]), src=0)
    check(received, np.full((2, 3), float(dist.get_rank() != 0)))


def groups_side_by_side() -> list:
    """Two groups of the same two ranks, and overlapping ones, used in different orders by their members."""
    start()
    me, n = dist.get_rank(), dist.get_world_size()
    a, b, c = group_of([0, 1]), group_of([1, 2, 3]), group_of([0, 3])
    twin = dist.new_group([0, 1])
    x, y = paddle.full([3], float(me)), paddle.full([20000], float(me + 1))
    if me in (0, 1):
        first, second = (a, twin) if me == 0 else (twin, a)
        tensors = {a.id: x.clone(), twin.id: y.clone()}
        tasks = [dist.all_reduce(tensors[g.id], group=g, sync_op=False) for g in (first, second)]
        for task in tasks:
            task.wait()
        check(tensors[a.id], np.full(3, 1.0))
        check(tensors[twin.id], np.full(20000, 3.0))
    if me in (1, 2, 3):
        z = x.clone()
        dist.all_reduce(z, group=b)
        check(z, np.full(3, 6.0))
    if me in (0, 3):
        z = x.clone()
        dist.broadcast(z, src=3, group=c)
        check(z, np.full(3, 3.0))
    return [n]


def in_the_background(count: int) -> bool:
    """Sums complete without a wait, while the program runs an operation on another group."""
    start()
    rank, world = dist.get_rank(), dist.get_world_size()
    ours, theirs = (group_of(list(range(world))), group_of(list(range(world))[::-1]))
    tensors = [paddle.full([count], float(rank + i)) for i in range(3)]
    tasks = [dist.all_reduce(t, group=ours, sync_op=False) for t in tensors]
    alone = paddle.full([4], 1.0)
    dist.all_reduce(alone, group=theirs)
    deadline = time.monotonic() + 30
    while not all(task.is_completed() for task in tasks) and time.monotonic() < deadline:
        time.sleep(0.001)
    ended = all(task.is_completed() for task in tasks)
    for task in tasks:
        task.wait()
    expected = [sum(r + i for r in range(world)) for i in range(3)]
    assert [t.unique().tolist() for t in tensors] == [[float(e)] for e in expected]
    assert alone.unique().tolist() == [float(world)]
    return ended


def ring(rounds: int, count: int) -> None:
    """Each rank sends to the next and receives from the previous one, in either order."""
    start()
    me, n = dist.get_rank(), dist.get_world_size()
    for turn in range(rounds):
        mine, theirs = paddle.full([count], float(100 * turn + me)), paddle.zeros([count])
        send = dist.P2POp(dist.isend, mine, (me + 1) % n)
        receive = dist.P2POp(dist.irecv, theirs, (me - 1) % n)
        for task in dist.batch_isend_irecv([receive, send] if (turn + me) % 2 else [send, receive]):
            task.wait()
        check(theirs, np.full(count, 100.0 * turn + (me - 1) % n))
        task = dist.irecv(theirs, (me + 1) % n)
        dist.send(mine, (me - 1) % n)
        task.wait()
        check(theirs, np.full(count, 100.0 * turn + (me + 1) % n))


def partial(count: int) -> None:
    """As in a pipeline with tensor parallelism: each rank sends a part, then the parts are gathered."""
    start()
    me, n = dist.get_rank(), dist.get_world_size()
    group = dist.get_group(0).process_group
    whole = paddle.arange(count, dtype="float32")
    for source in range(n):
        target = (source + 1) % n
        if me == source:
            group.send_partial_on_calc_stream(whole, target, n, 1)
        elif me == target:
            out = paddle.zeros([count])
            group.recv_partial_on_calc_stream(out, source, n, 1)
            size = count // n
            expected = np.zeros(count)
            expected[size : 2 * size] = np.arange(size, 2 * size)
            check(out, expected)
    mine = paddle.zeros([count])
    size = count // n
    mine[me * size : (me + 1) * size] = whole[me * size : (me + 1) * size]
    group.all_gather_partial_on_calc_stream(mine, mine, n, me)
    check(mine, np.arange(count, dtype=np.float64))


def die_in_transfer(rank: int, after: float) -> str:
    """A thread of the rank kills it during a large all-reduce, or close to one."""
    import os
    import signal
    import threading

    start()
    x = paddle.ones([4 << 20])
    dist.all_reduce(x)
    if dist.get_rank() == rank:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begin = time.perf_counter()
    try:
        while time.perf_counter() - begin < 20:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
    except CommError as error:
        return f"{time.perf_counter() - begin:.2f} {type(error).__name__}: {error}"
    return "nothing"


def counted() -> dict:
    start()
    me, n = dist.get_rank(), dist.get_world_size()
    x = paddle.zeros([12 * n])
    cpu_backend.reset_traffic()
    dist.all_reduce(x)
    dist.all_reduce(x)
    dist.stream.all_gather(paddle.zeros([12 * n * n]), x)
    dist.stream.reduce_scatter(paddle.zeros([12]), x)
    dist.broadcast(x, src=0)
    dist.alltoall_single(paddle.zeros([12 * n]), x)
    if me == 0:
        dist.send(x, 1)
    if me == 1:
        dist.recv(x, 0)
    return cpu_backend.traffic()[0]["operations"]


# -- failures: each returns only if nothing went wrong --------------------------------------------


def die(rank: int, how: str) -> str:
    """The given rank ends; the others report the error they got, and when."""
    import os
    import signal

    start()
    x = paddle.ones([4])
    dist.all_reduce(x)
    begin = time.perf_counter()
    if dist.get_rank() == rank:
        time.sleep(0.3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "goodbye":
            cpu_backend.close()
            time.sleep(2)
            return "done"
    try:
        # Not everybody waits for the dead one directly: 3 waits for 2, which waits for 1, ...
        me = dist.get_rank()
        dist.recv(x, src=(me - 1) % dist.get_world_size())
    except CommError as error:
        return f"{time.perf_counter() - begin:.2f} {type(error).__name__}: {error}"
    return "nothing"


def out_of_step(kind: str) -> str:
    start()
    x, me = paddle.ones([4 if kind != "size" else 4 + dist.get_rank()]), dist.get_rank()
    begin = time.perf_counter()
    try:
        if kind == "size" or (kind == "collective" and me == 0):
            dist.all_reduce(x)
        elif kind == "collective":
            dist.broadcast(x, src=1)
        elif kind == "late":
            if me == 1:
                time.sleep(3)
            dist.all_reduce(x)
            check(x, np.full(4, 2.0))
    except CommError as error:
        time.sleep(0.5)  # the other side reports what it sees, not that this one is gone
        return f"{time.perf_counter() - begin:.2f} {type(error).__name__}: {error}"
    return f"{time.perf_counter() - begin:.2f} fine"


# -- the operators that are replaced ------------------------------------------------------------


def parallel_cross_entropy(dtype: str) -> list[float]:
    """ParallelCrossEntropy with ignored labels against F.cross_entropy, forward and backward."""
    from paddle.distributed.fleet.layers.mpu.mp_ops import _c_softmax_with_cross_entropy

    start()
    me, n = dist.get_rank(), dist.get_world_size()
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((3, 5, 8 * n)).astype(dtype) * 4
    labels = generator.integers(0, 8 * n, (3, 5))
    labels[0, 0] = labels[2, 4] = -100
    weights = paddle.to_tensor(generator.standard_normal((3, 5, 1)).astype(dtype))
    whole = paddle.to_tensor(logits, stop_gradient=False)
    expected = paddle.nn.functional.cross_entropy(
        whole, paddle.to_tensor(labels[..., None]), reduction="none"
    )
    (expected * weights).sum().backward()
    part = paddle.to_tensor(logits[..., 8 * me : 8 * me + 8], stop_gradient=False)
    loss, softmax = _c_softmax_with_cross_entropy(
        part, paddle.to_tensor(labels), group=dist.get_group(0), return_softmax=True
    )
    (loss * weights).sum().backward()
    full = paddle.nn.functional.softmax(whole).numpy()[..., 8 * me : 8 * me + 8]
    gradient = whole.grad.numpy()[..., 8 * me : 8 * me + 8]
    return [
        float(np.abs(loss.numpy() - expected.numpy()).max()),
        float(np.abs(softmax.numpy() - full).max()),
        float(np.abs(part.grad.numpy() - gradient).max()),
    ]


def evaluation_loss(vocab: int, padding: int) -> float:
    """Relative difference of an evaluation's loss, in columns that ranks share, from that in float64."""
    from ppfleetx.nn.loss import token_loss
    from tests.nn.test_loss import example, in_float64

    start()
    me, n = dist.get_rank(), dist.get_world_size()
    logits, labels, mask = example(vocab, padding)
    width = (vocab + padding) // n
    part = paddle.to_tensor(logits[..., width * me : width * (me + 1)])
    rest = paddle.to_tensor(labels), paddle.to_tensor(mask), vocab
    with paddle.no_grad():
        found = token_loss(part, *rest, dist.get_group(0)).loss.item()
    expected = in_float64(logits, labels, mask, vocab)
    return abs(found - expected) / expected


def identity() -> None:
    """The gradient of a value that every rank uses is the sum of the ranks' gradients."""
    start()
    me, n = dist.get_rank(), dist.get_world_size()
    values_ = np.random.default_rng(1).standard_normal((2, 3)).astype("float32")
    x = paddle.to_tensor(values_, stop_gradient=False)
    same = paddle._C_ops.c_identity(x, 0, True, True)
    np.testing.assert_array_equal(same.numpy(), values_)
    (same * (me + 1)).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full_like(values_, sum(range(1, n + 1))))


def embedding_in_half(dtype: str) -> None:
    """The 16-bit vocabulary-parallel lookup: rows of other ranks are zero, gradients counted once."""
    start()
    me = dist.get_rank()
    table = paddle.to_tensor(np.arange(8.0).reshape(4, 2).astype("float32")).astype(dtype)
    table.stop_gradient = False
    ids = paddle.to_tensor([0, 5, 3, 5, 7])
    out = paddle._C_ops.c_embedding(table, ids, 4 * me, 8)
    local = np.array([0, 5, 3, 5, 7]) - 4 * me
    inside = (local >= 0) & (local < 4)
    expected = np.where(inside[:, None], np.arange(8.0).reshape(4, 2)[local.clip(0, 3)], 0)
    np.testing.assert_array_equal(out.astype("float32").numpy(), expected)
    out.astype("float32").sum().backward()
    counts = np.bincount(local[inside], minlength=4).astype("float32")
    np.testing.assert_array_equal(table.grad.astype("float32").numpy(), np.repeat(counts[:, None], 2, 1))
