"""Which layers forget their activations, and how much of them, to recompute them in the backward pass.

From least memory to least extra work: ``full`` keeps a layer's input only, ``full_attn`` forgets the
attention sub-block (projections included), ``core_attn`` forgets scores, softmax and context only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from ppfleetx.config.errors import ConfigError

GRANULARITIES = ("full", "full_attn", "core_attn")


@dataclass(frozen=True)
class RecomputePolicy:
    """The recompute keys of a model.

    Attributes:
        granularity: one of :data:`GRANULARITIES`, or None to keep everything.
        interval: every n-th layer, counted from the first.
        only_layers: only these layers; empty for all.
        except_layers: never these.
    """

    granularity: str | None = None
    interval: int = 1
    only_layers: Sequence[int] = ()
    except_layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.granularity is not None and self.granularity not in GRANULARITIES:
            raise ConfigError(
                f"must be one of {', '.join(GRANULARITIES)}",
                key="Model.recompute_granularity",
                value=self.granularity,
            )
        if self.interval < 1:
            raise ConfigError("must be at least 1", key="Model.recompute_interval", value=self.interval)

    def of_layer(self, index: int) -> str | None:
        """What layer ``index`` (of the whole model) recomputes, or None."""
        if self.only_layers and index not in self.only_layers:
            return None
        if index in self.except_layers or index % self.interval:
            return None
        return self.granularity


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run now, forget, and run again in the backward pass with the same random numbers.

    Args:
        function: pure but for its parameters and random numbers.
        *args: tensors or None, positional; at least one tensor carries a gradient.
    """
    from paddle.distributed.fleet.utils import recompute as fleet_recompute

    return fleet_recompute(function, *args)


def may_recompute(layer: paddle.nn.Layer) -> bool:
    """Whether there will be a backward pass to recompute in."""
    return layer.training and paddle.is_grad_enabled()
