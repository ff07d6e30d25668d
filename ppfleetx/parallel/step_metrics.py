"""Quantities other than gradients that a step reduces over the ranks: loss and metrics, the input scales of
fake quantization, and the loads of experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather
from ppfleetx.distributed.host_device_copy import read, upload
from ppfleetx.models.evaluator import Metric
from ppfleetx.nn.fake_quant import quantizers_of
from ppfleetx.nn.loss_output import LossOutput, Sum
from ppfleetx.nn.moe import Router
from ppfleetx.utils.log import get_logger

_AXES = ("dp", "sharding", "sep", "pp")  # reductions run over the axes in this order
# Along these axes, ranks hold different features or different tokens of the inputs of a linear.
_SCALE_AXES = ("mp", "sep", "dp", "sharding")
_PATIENCE = 20  # warn about an expert that gets no position in this many consecutive steps


class StepSums:
    """The sums of loss and metrics on this rank since the last :meth:`begin`.

    Args:
        names: names of all metrics that any rank can report, the same on all ranks.
    """

    def __init__(self, names: Sequence[str], ctx: ParallelContext) -> None:
        self.names, self._ctx = tuple(dict.fromkeys(names)), ctx
        # The loss is the same on all tensor-parallel ranks; a metric may differ.
        self._axes = (*_AXES, "mp") if names else _AXES
        self.begin()

    def begin(self) -> None:
        self._losses: list[paddle.Tensor] = []
        self._metrics: dict[str, list[Sum]] = {name: [] for name in self.names}
        self._undeclared: set[str] = set()

    def add(self, found: LossOutput) -> None:
        if self._counts_here(found.same_on):
            self._losses.append(found.loss.detach())
        for name, metric in found.metrics.items():
            self.add_metric(name, metric)

    def add_metric(self, name: str, metric: Sum) -> None:
        if name not in self._metrics:
            self._undeclared.add(name)
        elif self._counts_here(metric.same_on):
            self._metrics[name].append(Sum(_detached(metric.value), _detached(metric.count)))

    def over_job(self) -> paddle.Tensor:
        """Return the sums of losses and metrics over the job as a float64 vector on the device. :meth:`read`
        splits the vector into loss and metrics."""
        numbers = [sum_of(self._losses), paddle.full([], len(self._undeclared), "float64")]
        for metrics in self._metrics.values():
            numbers += [sum_of([m.value for m in metrics]), sum_of([m.count for m in metrics])]
        return self._ctx.sum_tensor_over(self._axes, paddle.stack(numbers))

    def read(self, numbers: Sequence[float]) -> tuple[float, Mapping[str, Metric]]:
        """Return the loss sum, and the metrics whose count is above 0. ``numbers`` are the values of the
        vector from :meth:`over_job`. Raises ConfigError on all ranks if a rank reported an undeclared
        metric."""
        loss, num_undeclared, *numbers = numbers
        if num_undeclared:
            raise _refused({name for found in gather(self._ctx, sorted(self._undeclared)) for name in found})
        found = zip(self.names, numbers[::2], numbers[1::2], strict=True)
        return loss, {name: Metric(total, count) for name, total, count in found if count}

    def _counts_here(self, same_on: Sequence[str]) -> bool:
        return all(self._ctx.rank_on(axis) == 0 for axis in same_on if axis in self._axes)


def _detached(number: paddle.Tensor | float) -> paddle.Tensor | float:
    return number.detach() if isinstance(number, paddle.Tensor) else number


def _refused(names: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"reports metrics that are not declared: {', '.join(sorted(names))}. Add them to `metrics` of the "
        "task (`BasicModule.metrics`), or of the architecture (`ArchitectureTraits`)",
        key="Model.module",
    )


def sum_of(numbers: Sequence[paddle.Tensor | float]) -> paddle.Tensor:
    """Return the sum of scalars as a float64 tensor on the device."""
    tensors = [number.astype("float64") for number in numbers if isinstance(number, paddle.Tensor)]
    known = sum(number for number in numbers if not isinstance(number, paddle.Tensor))
    if known or not tensors:
        tensors.append(paddle.full([], known, "float64"))
    return paddle.stack(tensors).sum()


class ActivationScales:
    """Updates the input scales of fake-quantized linears. The scale of a linear is a moving average of the
    largest input magnitude in each global batch."""

    def __init__(self, model: paddle.nn.Layer, ctx: ParallelContext) -> None:
        self._ctx, self._quantizers = ctx, quantizers_of(model)
        self._moving = [one for one in self._quantizers if one.follows and one.input_scale is not None]

    def begin(self) -> None:
        for quantizer in self._quantizers:
            quantizer.begin()

    @paddle.no_grad()
    def update(self) -> None:
        """Update the input scale of each fake-quantized linear with the largest input magnitude in the global
        batch. Call this after the optimizer step. Frozen scales are not changed."""
        if not self._moving:
            return
        largest = paddle.stack([quantizer.take_largest() for quantizer in self._moving])
        self._ctx.max_tensor_over(_SCALE_AXES, largest)
        for quantizer, value in zip(self._moving, largest.unbind(0), strict=True):
            quantizer.follow(value)


class ExpertLoads:
    """Sums the loads of experts over the job, balances the routers, and warns about unused experts. The load
    of an expert is the number of tokens for which it was chosen. Tokens that the loss mask excludes do not
    count.

    Args:
        routers: number of experts of each router of the model, by canonical name.
        same_on: axes along which ranks hold the same hidden states. The loads of only one of these ranks are
            counted.
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        routers: Mapping[str, int],
        ctx: ParallelContext,
        same_on: Sequence[str],
    ) -> None:
        self._ctx, self._sizes = ctx, dict(routers)
        self._axes = [axis for axis in (*_AXES, "mp") if axis not in same_on]
        held = [layer for layer in model.sublayers() if isinstance(layer, Router)]
        self._held = {layer.weight.info.name.removesuffix(".weight"): layer for layer in held}
        self._loads: dict[str, np.ndarray] = {}
        self._idle = {name: np.zeros(size, int) for name, size in routers.items()}

    def begin(self) -> None:
        for router in self._held.values():
            router.seen = None

    @paddle.no_grad()
    def count(self) -> Mapping[str, Metric]:
        """Sum the expert loads of a step over all ranks, and return metrics. ``expert_load/LAYER`` is the
        largest load in the layer divided by the layer's mean load. ``expert_load`` is the mean of this ratio
        over the layers."""
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
        """Balance the routers by the expert loads of the last step. Also warn about experts that got no
        tokens for many steps. Call this only if the update of the step was applied."""
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
                    f"layer {_layer(name)}: no positions in the last {_PATIENCE} steps for the experts "
                    f"{', '.join(map(str, starving))}; {(idle >= _PATIENCE).sum()} of {len(idle)} are idle. "
                    "Model.moe.aux_loss or bias_update_rate balances the experts"
                )


def _layer(router: str) -> str:
    """Return N, the layer number in a router's name ``decoder.layers.N.mlp.router``."""
    return router.removeprefix("decoder.layers.").partition(".")[0]


def _or_zeros(seen: paddle.Tensor | None, num_experts: int) -> paddle.Tensor:
    if seen is None:
        return paddle.zeros([2 * num_experts], "float64")
    return seen.reshape([-1]).astype("float64")
