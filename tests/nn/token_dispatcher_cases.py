"""Cases of the expert exchange, run in the ranks of a pool: results on several ranks against one rank with
all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

EXPERTS, WIDTH, INNER = 8, 6, 8

ROUTES = {
    "any": lambda rank, rng: rng.integers(0, EXPERTS, 5 + 3 * rank),
    "one expert": lambda rank, rng: np.full(6, 2),
    "one rank has no rows": lambda rank, rng: rng.integers(0, EXPERTS, 7 if rank else 0),
    "first half of the experts": lambda rank, rng: rng.integers(0, EXPERTS // 2, 9 * (rank % 2)),
    "no rows": lambda rank, rng: np.zeros(0, np.int64),
}
"""The experts of the rows of each rank, by the name of the case."""


def case_of(route: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's rows and the expert of each row, sorted by expert."""
    rng = np.random.default_rng([rank, 7])
    chosen = np.sort(ROUTES[route](rank, rng))
    return rng.standard_normal((len(chosen), WIDTH)).astype(np.float32), chosen


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"w1": (EXPERTS, WIDTH, INNER), "w2": (EXPERTS, INNER, WIDTH), "b2": (EXPERTS, WIDTH)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def through_experts(exchange: Any, rows: Any, chosen: np.ndarray, params: dict[str, Any]) -> Any:
    """Apply the toy experts to rows."""
    import paddle

    counts = paddle.to_tensor(np.bincount(chosen, minlength=EXPERTS))
    journey = exchange.dispatch(rows, counts)
    there, local_counts = journey.arrive()
    assert there.shape[0] == local_counts.sum() and len(local_counts) == params["w1"].shape[0]
    outputs, end = [], 0
    for expert, count in enumerate(local_counts.tolist()):
        begin, end = end, end + count
        if count:
            inner = paddle.tanh(there[begin:end] @ params["w1"][expert])
            output = inner @ params["w2"][expert]
            outputs.append(output + params["b2"][expert] if exchange.adds_output_bias else output)
    return journey.back(paddle.concat(outputs) if outputs else there)


def parameters(ep: int, ep_rank: int, emp: int, emp_rank: int) -> dict[str, Any]:
    import paddle

    mine = {name: np.split(array, ep)[ep_rank] for name, array in weights().items()}
    mine["w1"], mine["w2"] = (
        np.split(mine[name], emp, axis)[emp_rank] for name, axis in (("w1", 2), ("w2", 1))
    )
    params = {name: paddle.to_tensor(array) for name, array in mine.items()}
    for parameter in params.values():
        parameter.stop_gradient = False
    return params


def run(exchange: Any, rows: np.ndarray, chosen: np.ndarray, params: dict[str, Any]) -> tuple[Any, ...]:
    """Outputs, and the gradients of rows and parameters, of a loss in which each row has another weight."""
    import paddle

    rows = paddle.to_tensor(rows)
    rows.stop_gradient = False
    outputs = through_experts(exchange, rows, chosen, params)
    (outputs * paddle.cos(rows.detach() * 3)).sum().backward()
    grads = {n: np.zeros(p.shape, "f4") if p.grad is None else p.grad.numpy() for n, p in params.items()}
    return outputs.numpy(), rows.grad.numpy(), grads


def worst_difference(ep: int, emp: int, route: str) -> float:
    """The largest difference of this rank's outputs and gradients from those of one rank with all rows and
    experts."""
    import paddle
    from paddle import distributed

    from ppfleetx.nn.token_dispatcher import TokenDispatcher

    rank, size = distributed.get_rank(), distributed.get_world_size()
    groups = groups_along(ep, emp)
    at_ep, at_emp = divmod(rank, emp)
    params = parameters(ep, at_ep, emp, at_emp)
    outputs, gradient, grads = run(TokenDispatcher(**groups), *case_of(route, rank), params)
    if emp > 1:
        b2 = paddle.to_tensor(grads["b2"])
        distributed.all_reduce(b2, group=groups["emp"])
        grads["b2"] = b2.numpy()

    cases = [case_of(route, r) for r in range(size)]
    all_rows, all_chosen = (np.concatenate(parts) for parts in zip(*cases, strict=True))
    order = np.argsort(all_chosen, kind="stable")
    whole = run(TokenDispatcher(), all_rows[order], all_chosen[order], parameters(1, 0, 1, 0))
    back = np.argsort(order)
    begin = sum(len(case_of(route, r)[1]) for r in range(rank))
    here = slice(begin, begin + len(outputs))
    cut = {n: np.split(g, ep)[at_ep] for n, g in whole[2].items()}
    cut["w1"], cut["w2"] = (np.split(cut[n], emp, axis)[at_emp] for n, axis in (("w1", 2), ("w2", 1)))
    pairs = [(outputs, whole[0][back][here]), (gradient, whole[1][back][here])]
    pairs += [(grads[name], cut[name]) for name in cut]
    return max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=0.0)


def groups_along(ep: int, emp: int) -> dict[str, Any]:
    ranks = np.arange(ep * emp).reshape(ep, emp)
    return {"ep": _mine(ranks.T.tolist()), "emp": _mine(ranks.tolist())}


def _mine(lists: Sequence[Sequence[int]]) -> Any:
    from paddle import distributed

    from tests.distributed.cpu.cases import group_of

    made = {tuple(ranks): group_of(list(ranks)) for ranks in lists if len(ranks) > 1}
    return next((group for ranks, group in made.items() if distributed.get_rank() in ranks), None)


def levels_apart(ep: int, emp: int, route: str, per_node: int) -> list[list[int]]:
    """Exchange on one level and on two; check that the results have the same bits, and return the group sizes
    of all all-to-alls."""
    from paddle import distributed

    from ppfleetx.config.mesh import levels_of
    from ppfleetx.nn.token_dispatcher import TokenDispatcher

    groups, along = groups_along(ep, emp), np.arange(ep * emp).reshape(ep, emp).T
    split = [levels_of(ranks.tolist(), per_node) for ranks in along]
    levels = tuple(_mine([*chain(*lists)]) for lists in zip(*split, strict=True))
    at_ep, at_emp = divmod(distributed.get_rank(), emp)
    found, sizes = [], []
    for exchange in (TokenDispatcher(**groups), TokenDispatcher(**groups, levels=levels)):
        with _noted_all_to_alls() as calls:
            params = parameters(ep, at_ep, emp, at_emp)
            outputs, gradient, grads = run(exchange, *case_of(route, distributed.get_rank()), params)
        found.append([outputs, gradient, *grads.values()])
        sizes.append(calls)
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one, two)
    return sizes


@contextmanager
def _noted_all_to_alls() -> Iterator[list[int]]:
    from paddle import distributed

    sizes, original = [], distributed.stream.alltoall_single

    def noting(*arguments: Any, **more: Any) -> Any:
        sizes.extend(a.nranks for a in (*arguments, *more.values()) if hasattr(a, "nranks"))
        return original(*arguments, **more)

    distributed.stream.alltoall_single = noting
    try:
        yield sizes
    finally:
        distributed.stream.alltoall_single = original


def halves() -> list[Any]:
    """For rows that two ranks both hold: the part of each rank, the gathered whole, and the gradient of the
    rows."""
    import paddle

    from ppfleetx.nn.token_dispatcher import TokenDispatcher
    from tests.distributed.cpu.cases import group_of

    exchange = TokenDispatcher(alike=group_of([0, 1]))
    found = []
    for num_rows in (4, 5, 1):
        rows = paddle.arange(num_rows * 2, dtype="float32").reshape([num_rows, 2])
        rows.stop_gradient = False
        own = exchange.own(rows)
        whole = exchange.whole(own * own, num_rows)
        (whole * 3).sum().backward()
        expected = rows.numpy()
        assert np.array_equal(whole.numpy(), expected**2) and np.array_equal(rows.grad.numpy(), 6 * expected)
        assert np.array_equal(exchange.own(rows.detach()).numpy(), own.numpy())
        found.append(own.shape[0])
    return found
