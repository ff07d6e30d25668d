"""Rows travel to their experts and back as if one rank had all of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ppfleetx.nn.expert_exchange import sorted_by_expert

EXPERTS, WIDTH, INNER = 4, 6, 8

ROUTES = {
    "any": lambda rank, rng: rng.integers(0, EXPERTS, 5 + 3 * rank),
    "one expert": lambda rank, rng: np.full(6, 2),
    "one rank has no rows": lambda rank, rng: rng.integers(0, EXPERTS, 7 if rank else 0),
    "no rows": lambda rank, rng: np.zeros(0, np.int64),
}
"""The experts of the rows of each rank, by the name of the case."""


def test_order_by_expert():
    # Two slices, two sources, two experts; slice 0 has 3 rows of padding.
    table = np.array([[[1, 0], [0, 2]], [[1, 1], [2, 2]]])
    # In slice 0: a(expert 0) | b b (expert 1); in slice 1: c(0) d(1) | e e(0) f f(1).
    assert sorted_by_expert(table, 6).tolist() == [0, 6, 8, 9, 1, 2, 7, 10, 11]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("ep", "emp"), [(2, 1), (1, 2), (4, 1), (2, 2)])
def test_outputs_and_gradients_are_those_of_one_rank(pools, ep, emp, route):
    differences = pools(ep * emp).run(
        "tests.nn.test_expert_exchange:worst_difference", ep=ep, emp=emp, route=route
    )
    assert max(differences) < 1e-5


def test_ranks_that_hold_the_same_rows_share_them(pools):
    assert pools(2).run("tests.nn.test_expert_exchange:halves") == [[2, 3, 1], [2, 2, 1]]


# -- in the ranks


def case_of(route: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a rank and the expert of each, sorted by expert."""
    rng = np.random.default_rng([rank, 7])
    chosen = np.sort(ROUTES[route](rank, rng))
    return rng.standard_normal((len(chosen), WIDTH)).astype(np.float32), chosen


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"w1": (EXPERTS, WIDTH, INNER), "w2": (EXPERTS, INNER, WIDTH), "b2": (EXPERTS, WIDTH)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def through_experts(exchange: Any, rows: Any, chosen: np.ndarray, params: dict[str, Any]) -> Any:
    """What experts make of rows."""
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
    """Outputs, the gradient of the rows, and of the parameters, of a loss that tells rows apart."""
    import paddle

    rows = paddle.to_tensor(rows)
    rows.stop_gradient = False
    outputs = through_experts(exchange, rows, chosen, params)
    (outputs * paddle.cos(rows.detach() * 3)).sum().backward()
    grads = {n: np.zeros(p.shape, "f4") if p.grad is None else p.grad.numpy() for n, p in params.items()}
    return outputs.numpy(), rows.grad.numpy(), grads


def worst_difference(ep: int, emp: int, route: str) -> float:
    """From one rank with all rows and experts: of outputs and gradients of this rank."""
    import paddle
    from paddle import distributed

    from ppfleetx.nn.expert_exchange import ExpertExchange
    from tests.distributed.cpu.cases import group_of

    rank, size = distributed.get_rank(), distributed.get_world_size()
    along = {
        "ep": [[p * emp + j for p in range(ep)] for j in range(emp)],
        "emp": np.arange(size).reshape(ep, emp).tolist(),
    }
    groups = {}
    for axis, lists in along.items():
        made = {tuple(ranks): group_of(ranks) for ranks in lists if len(ranks) > 1}
        groups[axis] = next((group for ranks, group in made.items() if rank in ranks), None)
    at_ep, at_emp = divmod(rank, emp)
    params = parameters(ep, at_ep, emp, at_emp)
    outputs, gradient, grads = run(ExpertExchange(**groups), *case_of(route, rank), params)
    if emp > 1:
        b2 = paddle.to_tensor(grads["b2"])
        distributed.all_reduce(b2, group=groups["emp"])
        grads["b2"] = b2.numpy()

    cases = [case_of(route, r) for r in range(size)]
    all_rows, all_chosen = (np.concatenate(parts) for parts in zip(*cases, strict=True))
    order = np.argsort(all_chosen, kind="stable")
    whole = run(ExpertExchange(), all_rows[order], all_chosen[order], parameters(1, 0, 1, 0))
    back = np.argsort(order)
    begin = sum(len(case_of(route, r)[1]) for r in range(rank))
    here = slice(begin, begin + len(outputs))
    cut = {n: np.split(g, ep)[at_ep] for n, g in whole[2].items()}
    cut["w1"], cut["w2"] = (np.split(cut[n], emp, axis)[at_emp] for n, axis in (("w1", 2), ("w2", 1)))
    pairs = [(outputs, whole[0][back][here]), (gradient, whole[1][back][here])]
    pairs += [(grads[name], cut[name]) for name in cut]
    return max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=0.0)


def halves() -> list[Any]:
    """Rows that two ranks hold alike: the parts of each, the whole again, and the gradient of the rows."""
    import paddle

    from ppfleetx.nn.expert_exchange import ExpertExchange
    from tests.distributed.cpu.cases import group_of

    exchange = ExpertExchange(alike=group_of([0, 1]))
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
