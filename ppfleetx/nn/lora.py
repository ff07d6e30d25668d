"""Low-rank adapters (Hu et al., "LoRA", 2021) for the frozen linears of a model. An adapter has the
parameters ``{linear}.lora.a`` and ``{linear}.lora.b``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import paddle
from paddle import nn

from ppfleetx.config.sections.lora import LoraConfig
from ppfleetx.nn.matmul import Counts, Matmul
from ppfleetx.nn.stage import LayerFactory, NameOf, Stage, ask_for_gradient


class LoraBranch(nn.Layer):
    """A low-rank adapter ``scale * join(dropout(x) A) B`` with A ``[in, rank]`` and B ``[rank, out]``. For
    experts, A and B have a leading dimension of experts.

    Args:
        a, b: shapes of this rank's slices of A and B.
        join: the communication between ranks after the matmul with A; None: no communication.
    """

    def __init__(
        self,
        a: Sequence[int],
        b: Sequence[int],
        *,
        scale: float,
        dropout: nn.Layer,
        join: Callable[[paddle.Tensor], paddle.Tensor] | None = None,
        matmul: Matmul | None = None,
    ) -> None:
        super().__init__()
        zeros = nn.initializer.Constant(0.0)  # the real values come from build_stage
        self.a = self.create_parameter(list(a), default_initializer=zeros)
        self.b = self.create_parameter(list(b), default_initializer=zeros)
        self.scale, self.dropout, self.join = scale, dropout, join
        self._matmul = matmul or Matmul()

    def forward(self, x: paddle.Tensor, counts: Counts | None = None) -> paddle.Tensor:
        """Return the adapter's output ``[..., out]`` for the linear's input ``x [..., in]``. It is added to
        the linear's output.

        Args:
            counts: number of rows for each expert; None: the linear has one matrix.
        """
        low = self._times(self.dropout(x), self.a, counts)
        if self.join is not None:
            low = self.join(low)
        return self._times(low, self.b, counts) * self.scale

    def _times(self, x: paddle.Tensor, weight: paddle.Tensor, counts: Counts | None) -> paddle.Tensor:
        if counts is None:
            return self._matmul.linear(x, weight)
        return self._matmul.grouped(x, weight, None, counts)


def with_adapters(stages: Sequence[Stage], cfg: LoraConfig, factory: LayerFactory) -> list[Stage]:
    """Return ``stages`` with adapters on the linears that ``cfg`` selects, and with all other parameters
    frozen. A ``finish`` function that a stage already has is lost."""
    adapt = partial(_adapt, cfg=cfg, factory=factory)
    first, *rest = (replace(stage, finish=adapt) for stage in stages)
    return [replace(first, finish=partial(adapt, is_first=True)), *rest]


def _adapt(
    layer: nn.Layer, name_of: NameOf, *, cfg: LoraConfig, factory: LayerFactory, is_first: bool = False
) -> None:
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    for path, linear in list(layer.named_sublayers()):
        if cfg.adapts(name_of(path)):
            linear.add_sublayer("lora", factory.lora(linear, cfg))
            linear.register_forward_post_hook(_add_branch)
    if is_first:
        layer.register_forward_post_hook(ask_for_gradient)


def _add_branch(linear: nn.Layer, inputs: tuple[paddle.Tensor, ...], output: paddle.Tensor) -> paddle.Tensor:
    return output + linear.lora(*inputs)
