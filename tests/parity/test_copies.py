"""Copies of a parameter stay equal to the bit whatever the last bits of their gradients are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity.low_precision import _held
from tests.parity.training import build, take_step

SMALL = {"Model.num_layers": 2}
LORA = {**SMALL, "Model.lora.rank": 4, "Model.lora.alpha": 16.0}
POSITIONS, NORM, EMBEDDING = (
    "embedding.position_embeddings.weight",
    "decoder.final_norm.weight",
    "embedding.word_embeddings.weight",
)
PLANS = [
    (Plan(mp=2), SMALL, POSITIONS),
    (Plan(mp=2, sequence_parallel=True), SMALL, POSITIONS),
    (Plan(sep=2), SMALL, POSITIONS),
    (Plan(dp=2), SMALL, POSITIONS),
    *((Plan(sharding=2, sharding_stage=stage), SMALL, POSITIONS) for stage in (1, 3)),
    (Plan(pp=2, virtual_pp_degree=2), {"Model.num_layers": 4}, EMBEDDING),
    (Plan(mp=2), LORA, "decoder.layers.0.attention.qkv.lora.a"),
    (Plan(mp=2, sequence_parallel=True), LORA, "decoder.layers.1.mlp.fc2.lora.b"),
    (Plan(mp=2, pp=2), SMALL, EMBEDDING),
    (Plan(mp=2, pp=2, sequence_parallel=True), SMALL, NORM),
    (Plan(dp=2, mp=2, sequence_parallel=True), SMALL, NORM),
    (Plan(sep=2, mp=2), SMALL, POSITIONS),
    (Plan(sharding=2, mp=2, sharding_stage=3), SMALL, POSITIONS),
    (Plan(sharding=2, pp=2, sharding_stage=2), SMALL, EMBEDDING),
]


NAMES = [f"{plan}{', LoRA' if extra is LORA else ''}" for plan, extra, _ in PLANS]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(("plan", "extra", "copied"), PLANS, ids=NAMES)
def test_one_ulp_on_one_rank(comparison, plan, extra, copied):
    ranks = comparison.pools.run(
        plan,
        "tests.parity.test_copies:copies_after_a_noisy_step",
        extra=extra,
    )
    assert any(copied in rank["copied"] for rank in ranks), "nothing to be made equal"
    assert sum(rank["changed"] for rank in ranks) >= len({name for r in ranks for name in r["copied"]})
    assert [rank["message"] for rank in ranks] == [""] * plan.world_size


# -- in the ranks


def copies_after_a_noisy_step(plan: dict[str, Any], world_size: int, extra: dict[str, Any]) -> dict[str, Any]:
    """One step in which the gradient of each parameter with copies is one ulp off on its last holder, and
    sums over groups without rank 0 are one ulp off on all their members.

    Returns:
        Names of the parameters with copies on this rank, how many gradients were changed here, and whether
        the check of the copies, weights and optimizer states, passed: "" or its message.
    """
    from ppfleetx.config.errors import UserError
    from ppfleetx.distributed.consistency_checks import check_replicas
    from ppfleetx.distributed.coordination import gather

    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build(plan, world_size, "gpt", "adamw", 4, extra)
        places = {_place(p): p for p in runner.model.parameters() if not p.stop_gradient}
        holders: dict[str, list[int]] = {}
        for rank, held in enumerate(gather(ctx, list(places))):
            for place in held:
                holders.setdefault(place, []).append(rank)
        copied = [place for place in places if len(holders[place]) > 1]
        changed: set[str] = set()
        for place in copied:
            if holders[place][-1] == ctx.rank:
                places[place].register_hook(_one_ulp_off(place, changed))
        with _groups_that_differ():
            output = take_step(runner, 0, cfg, ctx)
        assert np.isfinite(output.grad_norm) and output.grad_norm > 0
        message = ""
        try:
            check_replicas(ctx, _held(runner))
        except UserError as error:
            message = str(error)
    return {"copied": sorted({p.split(" ")[0] for p in copied}), "changed": len(changed), "message": message}


def _place(parameter: paddle.Tensor) -> str:
    return f"{parameter.info.name} {list(parameter.info.offset)}"


def _one_ulp_off(place: str, changed: set[str]) -> Callable[[paddle.Tensor], paddle.Tensor]:
    def hook(gradient: paddle.Tensor) -> paddle.Tensor:
        changed.add(place)
        return _next(gradient)

    return hook


def _next(tensor: paddle.Tensor) -> paddle.Tensor:
    with paddle.no_grad():
        return paddle.nextafter(tensor.detach(), paddle.full_like(tensor, float("inf")))


@contextlib.contextmanager
def _groups_that_differ() -> Iterator[None]:
    """Sums over a group come out differently than over another group that has the same numbers to add.

    Not those of the tied weights: the sum of two numbers has one order.
    """
    from ppfleetx.distributed.collectives import all_reduce_packed, reduce_packed
    from ppfleetx.parallel import grad_sync, sharding

    def noisy(reduce: Callable[..., None], tensors: list[paddle.Tensor], group: Any, *more: Any) -> None:
        reduce(tensors, group, *more)
        if 0 not in group.ranks:
            for tensor in tensors:
                paddle.assign(_next(tensor), tensor)

    def all_reduce(tensors: list[paddle.Tensor], group: Any) -> None:
        is_pair_of_copies = group not in _axis_groups()
        (all_reduce_packed if is_pair_of_copies else lambda *a: noisy(all_reduce_packed, *a))(tensors, group)

    def reduce(tensors: list[paddle.Tensor], group: Any, owner: int) -> None:
        noisy(reduce_packed, tensors, group, owner)

    with (
        mock.patch.object(grad_sync, "all_reduce_packed", all_reduce),
        mock.patch.object(sharding, "reduce_packed", reduce),
    ):
        yield


def _axis_groups() -> list[Any]:
    from paddle.distributed import fleet

    hcg = fleet.get_hybrid_communicate_group()
    groups = [hcg.get_data_parallel_group(), hcg.get_model_parallel_group()]
    if hcg.get_sep_parallel_world_size() > 1:
        groups += [hcg.get_sep_parallel_group(), hcg.get_dp_sep_parallel_group()]
    return groups
