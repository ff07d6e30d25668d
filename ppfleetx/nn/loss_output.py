"""The result of a task's loss: a differentiable sum, and metrics as sums with counts. The runner divides the
sums by the counts of all micro batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.log import get_logger

SAME_ON_MP = ("mp",)
"""The axes whose ranks get the same results from ``token_loss`` and ``token_scores`` of the layer factory:
only the tensor-parallel axis."""


@dataclass(frozen=True)
class Sum:
    """A metric as a sum that has not been divided by its count yet.

    Attributes:
        value: sum over this rank's part of the micro batch, a scalar without a gradient.
        count: number of tokens (or other items) in the sum.
        same_on: axes (``mp``, ``sep``) whose ranks hold the same value and count, which are counted once.
            Along all other axes, values and counts are summed.
    """

    value: paddle.Tensor
    count: paddle.Tensor | float
    same_on: tuple[str, ...] = SAME_ON_MP


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro batch.

    Attributes:
        loss: sum of the loss over all valid tokens, a scalar with a gradient.
        metrics: metrics by name. The task declares the names (``BasicModule.metrics``).
        same_on: axes whose ranks hold the same ``loss``.
        rows: a function that returns the loss of each row as a :class:`Sum` with ``value [b]`` and
            ``count [b]``; None: the loss is not a sum over rows.
    """

    loss: paddle.Tensor
    metrics: Mapping[str, Sum] = field(default_factory=dict)
    same_on: tuple[str, ...] = SAME_ON_MP
    rows: Callable[[], Sum] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the sum of the loss and the count, so that the output unpacks as a pair. Deprecated: logs a
        warning, and will be removed after one more version."""
        _warn("a loss is a LossOutput, and no longer a pair: read its `loss`")
        yield self.loss
        yield None if self.rows is None else self.rows().count.sum()


def as_loss_output(found: Any, task: object) -> LossOutput:
    """Return ``found``, the result of ``task.loss``, as a :class:`LossOutput`. A pair (loss sum, count) is
    converted with a warning. Raises ConfigError for anything else."""
    if isinstance(found, LossOutput):
        return found
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ConfigError(
            f"{type(task).__name__}.loss must return a LossOutput (docs/extending.md), not an object of the "
            f"type {type(found).__name__}",
            key="Model.module",
        )
    _warn(
        f"{type(task).__name__}.loss returns a pair (loss sum, count); return LossOutput(loss sum) "
        "(docs/extending.md), and let `count` say what counts if it is not the sum of `loss_mask`"
    )
    loss, _ = found
    return LossOutput(loss)


@cache
def _warn(text: str) -> None:
    get_logger().warning(text)
