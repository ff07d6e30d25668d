"""The result of a task's loss: a differentiable sum, and metrics as sums with counts.

Neither is a mean. The runner divides the loss by a count that it knows before the first forward pass
(``BasicModule.count``), and each metric by the sum of its own counts, over all micro batches and ranks. So no
number depends on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import paddle

from ppfleetx.utils.log import get_logger

SAME_ON_MP = ("mp",)
"""What the factory's functions give is the same on all tensor-parallel ranks."""


@dataclass(frozen=True)
class Sum:
    """A metric before division.

    Attributes:
        value: sum over what this rank has of the micro batch, a scalar without a gradient.
        count: over how much.
        same_on: axes (``mp``, ``sep``) whose ranks hold the same two numbers, not a share of them: only the
            first such rank counts. Ranks of all other axes add up.
    """

    value: paddle.Tensor
    count: paddle.Tensor | float
    same_on: tuple[str, ...] = SAME_ON_MP


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro batch.

    Attributes:
        loss: is differentiated; the sum over what counts, a scalar.
        metrics: by name; the task declares the names (``BasicModule.metrics``).
        same_on: of ``loss``, see :class:`Sum`.
        rows: gives the loss of each row, ``value [b]`` and ``count [b]``, without a gradient; None: the loss
            is not a sum over rows.
    """

    loss: paddle.Tensor
    metrics: Mapping[str, Sum] = field(default_factory=dict)
    same_on: tuple[str, ...] = SAME_ON_MP
    rows: Callable[[], Sum] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Unpack as (loss sum, count), the former result, for one more version."""
        _warn("a loss is a LossOutput, and no longer a pair: read its `loss`")
        yield self.loss
        yield None if self.rows is None else self.rows().count.sum()


def as_loss_output(found: Any, task: object) -> LossOutput:
    """Return the result of ``task.loss`` as a :class:`LossOutput`; a pair (loss sum, count) is accepted
    for one more version, with a warning."""
    if isinstance(found, LossOutput):
        return found
    _warn(
        f"{type(task).__name__}.loss gives a pair (loss sum, count); return LossOutput(loss sum) "
        "(docs/extending.md), and let `count` say what counts if it is not the sum of `loss_mask`"
    )
    loss, _ = found
    return LossOutput(loss)


@cache
def _warn(text: str) -> None:
    get_logger().warning(text)
