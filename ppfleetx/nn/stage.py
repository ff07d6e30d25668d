"""A model as a list of named stages, and parameters with canonical names and slices.

A stage is a recipe (class and arguments) for one layer, such as a transformer block. It is not a pipeline
stage: a single device builds all stages, and a pipeline rank those of its own part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import paddle
from paddle import nn

from ppfleetx.config.mesh import Mesh
from ppfleetx.nn.fused_ops import FusedOps
from ppfleetx.nn.init import draw
from ppfleetx.nn.loss_output import LossOutput
from ppfleetx.nn.param_spec import PARTIAL, REPLICATE, ParamInfo, ParamSpec, placed

if TYPE_CHECKING:
    from ppfleetx.config.sections.compress import Form, QuantizationConfig
    from ppfleetx.config.sections.lora import LoraConfig
    from ppfleetx.nn.context_parallel import AttentionStrategy
    from ppfleetx.nn.layer_spec import LinearSpec, NormSpec, TableSpec
    from ppfleetx.nn.matmul import Matmul
    from ppfleetx.nn.mlp_spec import GroupedLinearSpec
    from ppfleetx.nn.token_dispatcher import TokenDispatcher

NameOf = Callable[[str], str]
"""A function that converts the path of a parameter or sub-layer within a layer to its canonical name in the
model."""

_ALONE = Mesh()

Finish = Callable[[nn.Layer, NameOf], None]
"""A function that modifies a new layer before its parameters get names and values."""


@dataclass(frozen=True)
class Tie:
    """A sub-layer that is shared by all stages with the same ``key``.

    Attributes:
        key: canonical name of the sub-layer; its parameters are named ``{key}.weight`` in every stage.
        attribute: name of the attribute that holds the sub-layer, in the layer of each stage.
    """

    # All parameters of the sub-layer must be shared. A parameter that is not shared would get no gradient in
    # the copy on another pipeline rank.
    key: str
    attribute: str


@dataclass(frozen=True)
class Stage:
    """The recipe of one layer of the model.

    Attributes:
        name: unique name, e.g. ``decoder.layers.3``.
        layer_cls: class of the layer. ``forward(state, cache=None)`` maps a tuple of tensors to a tuple of
            tensors (in the last stage, to one tensor).
        kwargs: arguments of the class.
        tie: the sub-layer that is shared with other stages; None: there is none.
        wraps: whether the layer is only a wrapper around a sub-layer with the stage's name. Parameter names
            then contain this name once: ``head.weight``, not ``head.head.weight``.
        finish: function that can modify the new layer before its parameters get names and values.
    """

    name: str
    layer_cls: type[nn.Layer]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tie: Tie | None = None
    wraps: bool = False
    finish: Finish | None = None

    def extended(self, extend: Finish) -> Stage:
        """Return a copy of the stage. Its ``finish`` calls ``extend`` first, and then the original
        ``finish``."""
        return replace(self, finish=partial(_finish_both, extend, self.finish))


def _finish_both(first: Finish, then: Finish | None, layer: nn.Layer, name_of: NameOf) -> None:
    first(layer, name_of)
    if then is not None:
        then(layer, name_of)


class LayerFactory(Protocol):
    """Makes the layers whose parameters a parallel plan can slice. Callers pass global sizes.

    Attributes:
        attention: the context-parallel strategy of attention.
        group: process group of the ranks that divide the columns of logits; None: this rank has all columns.
        sequence_parallel: whether tensor-parallel ranks hold different positions of the hidden states.
        keeps_weights: whether weights stay in memory and do not change after their first use.
        experts: sends hidden states to the ranks of their experts, and back.
        hidden_same_on: axes whose ranks hold the same hidden states of a micro batch.
    """

    attention: AttentionStrategy
    sequence_parallel: bool
    keeps_weights: bool
    fused: FusedOps
    matmul: Matmul
    experts: TokenDispatcher
    hidden_same_on: tuple[str, ...]
    group: Any

    def local_count(self, count: int, what: str) -> int:
        """Return how many of ``count`` items, such as attention heads, are on this rank. ``what`` names the
        items in errors."""

    def declare(self, parameter: paddle.Tensor, spec: ParamSpec) -> None:
        """Attach the declaration ``spec`` to a parameter that a layer has created itself. The parameter must
        have the shape of this rank's slice."""

    def linear(self, spec: LinearSpec) -> nn.Layer:
        """Make a linear layer; see :class:`LinearSpec` for its slicing."""

    def grouped_linear(self, spec: GroupedLinearSpec) -> nn.Layer:
        """Make the linear layers of the experts on this rank. If experts are sliced, the layers hold this
        rank's slices."""

    def quantizer(self, linear: nn.Layer, cfg: QuantizationConfig, *, follows: bool) -> nn.Layer:
        """Make a linear's fake quantizer. With ``follows``, training updates the scale of the linear's
        input."""

    def lora(self, linear: nn.Layer, cfg: LoraConfig) -> nn.Layer:
        """Make a low-rank adapter of a linear, sliced like the linear."""

    def quantized_linear(self, linear: nn.Layer, form: Form) -> nn.Layer:
        """Make a layer that replaces ``linear`` and stores its weights in the quantized format ``form``."""

    def quantized_embedding(self, embedding: nn.Layer, form: Form) -> nn.Layer:
        """Make a layer that replaces the word embedding and stores its rows in the 8-bit format ``form``."""

    def embedding(self, spec: TableSpec) -> nn.Layer:
        """Make an embedding. Every rank gets vectors of full width for all positions of its input."""

    def norm(self, spec: NormSpec) -> nn.Layer:
        """Make a norm over the last dimension, as declared by ``spec``."""

    def dropout(self, probability: float, *, inside_heads: bool = False) -> nn.Layer:
        """Make a dropout layer. With ``inside_heads``, each tensor-parallel rank draws its own mask."""

    def scatter_positions(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Select this rank's positions of the embedding's output ``[s, b, h]``, if sequence parallelism is
        on."""

    def gather_positions(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Under sequence parallelism, gather all positions of the last block's output ``[s, b, h]``. This is
        for layers that are not sliced: every tensor-parallel rank computes them for all positions."""

    def enter_head(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Convert hidden states to the input of a head whose columns are sliced. Under sequence parallelism,
        all positions are gathered. In the backward pass, the gradient is summed over the tensor-parallel
        ranks."""

    def tied_logits(self, hidden: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Multiply hidden states by the transposed word embedding. The columns of the logits stay sliced."""

    def local_positions(self, ids: paddle.Tensor) -> paddle.Tensor:
        """Select this context-parallel rank's columns of ``ids [b, s]``, which covers whole sequences."""

    def sum_over_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        """Sum ``values`` over the ranks that hold different positions of the same sequences. All these ranks
        must compute the same loss from the sum."""

    def all_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        """Gather ``values [s, ...]`` of whole sequences from the ranks that hold their positions, without a
        gradient."""

    def own_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        """Return the part of ``values [s, ...]`` at this rank's positions. ``values`` covers whole
        sequences."""

    def token_loss(
        self, logits: paddle.Tensor, labels: paddle.Tensor, loss_mask: paddle.Tensor, true_vocab: int
    ) -> LossOutput:
        """Compute the loss with :func:`ppfleetx.nn.loss.token_loss` from the head's output at this rank's
        positions. ``labels`` and ``loss_mask`` cover whole sequences. All ranks that divide the columns of
        the logits get the same sum."""

    def token_scores(
        self, logits: paddle.Tensor, labels: paddle.Tensor, mask: paddle.Tensor, true_vocab: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the log probability of each label, and whether it is the most likely token (see
        :func:`ppfleetx.nn.loss.token_scores`). ``logits`` cover only this rank's positions; ``labels`` and
        ``mask`` cover whole sequences. All tensor-parallel ranks get the same result."""


def build_stage(
    stage: Stage,
    seed: int | None,
    shared: MutableMapping[str, nn.Layer] | None = None,
    *,
    empty: bool = False,
) -> nn.Layer:
    """Build the layer of one stage, with canonical names and initial values of its parameters.

    Args:
        seed: seed of the initial values; None: they are not set, because a checkpoint will be loaded.
        shared: the tied sub-layers that this process has built so far, by key. A tied sub-layer that is
            missing is built and added.
        empty: whether to free the parameters' memory instead of drawing values.
    """
    kwargs, tie = dict(stage.kwargs), stage.tie
    shared = {} if shared is None else shared
    if tie is not None and tie.key in shared:
        kwargs[tie.attribute] = shared[tie.key]
    layer = stage.layer_cls(**kwargs)
    if stage.finish is not None:
        stage.finish(layer, partial(_canonical_name, stage))
    if tie is not None:
        shared[tie.key] = getattr(layer, tie.attribute)
    for path, parameter in layer.named_parameters():
        if parameter.info.name:  # already initialized by another stage that shares it
            continue
        _name(parameter, stage, path)
        if empty:
            parameter._clear_data()
        elif seed is not None:
            parameter.set_value(first_value(parameter, seed).astype(parameter.dtype))
    return layer


def declare(parameter: paddle.Tensor, spec: ParamSpec, mesh: Mesh = _ALONE, rank: int = 0) -> None:
    """Set ``parameter.spec`` to the declaration ``spec``, and ``parameter.info`` to the slice that ``rank``
    holds."""
    info = placed(spec, mesh, rank)
    assert tuple(parameter.shape) == info.local_shape, f"{parameter.shape} is made, {info} is declared"
    parameter.spec, parameter.info = spec, info
    parameter.is_distributed = "mp" not in spec.view.axes or spec.placement("mp") != REPLICATE  # for fleet


def _name(parameter: paddle.Tensor, stage: Stage, path: str) -> None:
    name, tie = _canonical_name(stage, path), stage.tie
    is_tied = tie is not None and path.startswith(f"{tie.attribute}.")
    spec = replace(parameter.spec, name=name, trains=not parameter.stop_gradient)
    if is_tied:
        spec = replace(spec, tie=tie.key, grad={**spec.grad, "pp": PARTIAL})
    parameter.spec, parameter.info = spec, replace(parameter.info, name=name)


def first_value(parameter: paddle.Tensor, seed: int) -> paddle.Tensor:
    """Return the initial values (float32) of a parameter. They depend on ``seed`` and on
    ``parameter.info.name``, which must already be set."""
    info: ParamInfo = parameter.info
    return paddle.to_tensor(
        draw(info.init, seed, info.name, info.global_shape, info.offset, info.local_shape)
    )


def _canonical_name(stage: Stage, path: str) -> str:
    if stage.tie is not None and path.startswith(stage.tie.attribute + "."):
        return f"{stage.tie.key}.{path[len(stage.tie.attribute) + 1 :]}"
    if not stage.wraps:
        return f"{stage.name}.{path}"
    above, _, own = stage.name.rpartition(".")
    assert path.split(".")[0] == own, f"{path} is not in the sub-layer {own}"
    return f"{above}.{path}" if above else path


def ask_for_gradient(layer: nn.Layer, _: Any, state: tuple[paddle.Tensor, ...]) -> tuple[paddle.Tensor, ...]:
    """Forward post-hook that makes the output of a frozen first layer require a gradient, because
    recomputation needs one."""
    if layer.training and paddle.is_grad_enabled():
        state[0].stop_gradient = False
    return state


def canonical_parameters(layer: nn.Layer) -> dict[str, paddle.Tensor]:
    """Return the parameters of a layer or container by canonical name. A tied parameter appears once."""
    return {parameter.info.name: parameter for parameter in layer.parameters()}
