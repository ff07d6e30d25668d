"""What a step reduces over the job: loss and metrics, in one vector, and input scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.together import gather
from ppfleetx.models.evaluator import Metric
from ppfleetx.nn.fake_quant import quantizers_of
from ppfleetx.nn.loss_output import LossOutput, Sum

_AXES = ("dp", "sharding", "sep", "pp")  # sums go over the axes in this order
# Ranks along these axes hold parts of the same linears' inputs, or inputs of other tokens.
_SCALE_AXES = ("mp", "sep", "dp", "sharding")


class StepSums:
    """The sums of loss and metrics on this rank, from one :meth:`begin` to the next. ``names`` are all
    metrics that any rank may report; the same on all ranks."""

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
        """Reduce all sums over the job into a float64 vector on the device, for :meth:`read`."""
        numbers = [sum_of(self._losses), paddle.full([], len(self._undeclared), "float64")]
        for metrics in self._metrics.values():
            numbers += [sum_of([m.value for m in metrics]), sum_of([m.count for m in metrics])]
        return self._ctx.sum_tensor_over(self._axes, paddle.stack(numbers))

    def read(self, numbers: Sequence[float]) -> tuple[float, Mapping[str, Metric]]:
        """(loss sum, metrics with a count above 0) from the numbers of :meth:`over_job`. Raises
        ConfigError on all ranks, if any rank reported a metric that is not declared."""
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
        f"gives metrics that are not declared: {', '.join(sorted(names))}. Name them in `metrics` of the "
        "task (`BasicModule.metrics`), or of the architecture (`ArchitectureTraits`)",
        key="Model.module",
    )


def sum_of(numbers: Sequence[paddle.Tensor | float]) -> paddle.Tensor:
    """Sum scalars in float64; the result stays on the device."""
    tensors = [number.astype("float64") for number in numbers if isinstance(number, paddle.Tensor)]
    known = sum(number for number in numbers if not isinstance(number, paddle.Tensor))
    if known or not tensors:
        tensors.append(paddle.full([], known, "float64"))
    return paddle.stack(tensors).sum()


class ActivationScales:
    """Input scales of fake-quantised linears, updated once a step from the global batch."""

    def __init__(self, model: paddle.nn.Layer, ctx: ParallelContext) -> None:
        self._ctx, self._quantizers = ctx, quantizers_of(model)
        self._moving = [one for one in self._quantizers if one.follows and one.input_scale is not None]

    def begin(self) -> None:
        for quantizer in self._quantizers:
            quantizer.begin()

    @paddle.no_grad()
    def update(self) -> None:
        """Move each scale towards the largest magnitude in the global batch; call this after a step."""
        if not self._moving:
            return
        largest = paddle.stack([quantizer.take_largest() for quantizer in self._moving])
        self._ctx.max_tensor_over(_SCALE_AXES, largest)
        for quantizer, value in zip(self._moving, largest.unbind(0), strict=True):
            quantizer.follow(value)
