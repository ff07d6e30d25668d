"""Apply update rules that need whole matrices to matrices that are sliced over tensor-parallel ranks.

Each matrix has one owner among the ranks that share it. The owner gathers the matrix, its gradient and its
states, updates them, and sends each rank its new slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import distributed

from ppfleetx.nn.param_spec import Shard, deal_out
from ppfleetx.optims.rule import ParamView, Rule

GroupOf = Callable[[str], Any]
"""This rank's group along an axis; None: there is no other rank."""


def update_whole(
    rule: Rule, views: Sequence[ParamView], group_of: GroupOf, *, lr: float, weight_decay: float
) -> None:
    """Apply ``rule.update`` to whole matrices. All ranks that share a matrix must call this."""
    alone: list[ParamView] = []
    shared: dict[str, list[ParamView]] = {}
    for view in views:
        axis = None if view.spec is None else view.spec.view.tensor
        if axis is None or group_of(axis) is None:
            alone.append(view)
        else:
            shared.setdefault(axis, []).append(view)
    if alone:
        rule.update(alone, lr=lr, weight_decay=weight_decay)
    for axis, members in shared.items():
        group = group_of(axis)
        owners = deal_out({view.name: view.value.size for view in members}, group.nranks)
        for view in members:
            placement, source = view.spec.lies(axis), group.ranks[owners[view.name]]
            dim = placement.dim if isinstance(placement, Shard) else None
            whole = _gathered(view, dim, group)
            if source == group.ranks[group.rank]:
                rule.update([whole], lr=lr, weight_decay=weight_decay)
            for mine, all_of_it in zip(_changing(view), _changing(whole), strict=True):
                distributed.broadcast(all_of_it, source, group=group)
                part = all_of_it if dim is None else all_of_it.split(group.nranks, axis=dim)[group.rank]
                paddle.assign(part, mine)


def _changing(view: ParamView) -> list[paddle.Tensor]:
    return [view.value, *view.states.values()]


def _gathered(view: ParamView, dim: int | None, group: Any) -> ParamView:
    def whole(tensor: paddle.Tensor) -> paddle.Tensor:
        if dim is None:
            return tensor.detach().clone()
        parts: list[paddle.Tensor] = []
        distributed.all_gather(parts, tensor.detach().contiguous(), group=group)
        return paddle.concat(parts, axis=dim)

    states = {name: whole(state) for name, state in view.states.items()}
    return ParamView(view.name, view.spec, whole(view.value), whole(view.gradient), states)
