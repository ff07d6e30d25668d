"""Expert loads: how many positions each expert got, counted once a step over the whole job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import paddle

from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.transfer import read, upload
from ppfleetx.models.evaluator import Metric
from ppfleetx.nn.moe import Router
from ppfleetx.utils.log import get_logger

_AXES = ("dp", "sharding", "sep", "pp", "mp")  # sums go over the axes in this order
_PATIENCE = 20  # an expert without a position for so many steps is starving


class ExpertLoads:
    """Collects the loads of a model's mixtures of experts; balances the routers and warns of starving
    experts.

    Args:
        routers: the number of experts of each router in the whole model, by the router's canonical name; the
            same on all ranks.
        same_on: axes whose ranks hold the same hidden states.
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        routers: Mapping[str, int],
        ctx: ParallelContext,
        same_on: Sequence[str],
    ) -> None:
        self._ctx, self._sizes = ctx, dict(routers)
        self._axes = [axis for axis in _AXES if axis not in same_on]
        held = [layer for layer in model.sublayers() if isinstance(layer, Router)]
        self._held = {layer.weight.info.name.removesuffix(".weight"): layer for layer in held}
        self._loads: dict[str, np.ndarray] = {}
        self._idle = {name: np.zeros(size, int) for name, size in routers.items()}

    def begin(self) -> None:
        for router in self._held.values():
            router.seen = None

    @paddle.no_grad()
    def count(self) -> Mapping[str, Metric]:
        """Sum the counts over all ranks after the passes of a step, and return the metrics.

        ``expert_load/LAYER`` is the load of the layer's most loaded expert divided by the mean load of its
        experts; ``expert_load`` is the mean over all layers.
        """
        if not self._sizes:
            return {}
        seen = {name: router.seen for name, router in self._held.items()}
        here = [_or_zeros(seen.get(name), size) for name, size in self._sizes.items()]
        total = read(self._ctx.sum_tensor_over(self._axes, paddle.concat(here)))
        ends = np.cumsum([2 * size for size in self._sizes.values()])[:-1]
        parts = np.split(total, ends)
        self._loads = {name: part.reshape(2, -1) for name, part in zip(self._sizes, parts, strict=True)}
        worst = {name: load[0].max() / max(load[0].mean(), 1e-9) for name, load in self._loads.items()}
        metrics = {"expert_load": Metric(sum(worst.values()), len(worst))}
        return metrics | {f"expert_load/{_layer(name)}": Metric(load, 1) for name, load in worst.items()}

    def update(self) -> None:
        """Balance the routers and warn of starving experts, after a step whose update was applied."""
        shares = {name: load[1] / max(load[1].sum(), 1.0) for name, load in self._loads.items()}
        mean = np.mean(list(shares.values()), 0) if len(set(self._sizes.values())) == 1 else None
        for name, router in self._held.items():
            share = mean if router.cfg.aux_loss.kind == "pooled" else shares[name]
            loads = self._loads[name][0]
            router.balance(*(upload(numbers.astype(np.float32)) for numbers in (loads, share)))
        if self._ctx.is_main:
            self._name_starving()

    def _name_starving(self) -> None:
        for name, loads in self._loads.items():
            idle = self._idle[name] = np.where(loads[0] > 0, 0, self._idle[name] + 1)
            if (idle == _PATIENCE).any():
                starving = np.flatnonzero(idle == _PATIENCE).tolist()
                get_logger().warning(
                    f"layer {_layer(name)}: {_PATIENCE} steps without a position for the experts "
                    f"{', '.join(map(str, starving))}; {(idle >= _PATIENCE).sum()} of {len(idle)} get none. "
                    "Model.moe.aux_loss or bias_update_rate balances them"
                )


def _layer(router: str) -> str:
    """The layer number N in a router's name ``decoder.layers.N.mlp.router``."""
    return router.removeprefix("decoder.layers.").partition(".")[0]


def _or_zeros(seen: paddle.Tensor | None, num_experts: int) -> paddle.Tensor:
    if seen is None:
        return paddle.zeros([2 * num_experts], "float64")
    return seen.reshape([-1]).astype("float64")
