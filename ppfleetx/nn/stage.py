"""A model as a list of named stages, and parameters that know their global slice.

A stage is a recipe (class and arguments) for one layer. A single card builds all stages into a plain
container; a pipeline rank builds its own stages from the same list. The name, initial value and slice of a
parameter are the same in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import paddle
from paddle import nn

from ppfleetx.config.mesh import Mesh
from ppfleetx.nn.fused import FusedOps
from ppfleetx.nn.init import draw
from ppfleetx.nn.loss_output import LossOutput
from ppfleetx.nn.param_spec import PARTIAL, REPLICATE, ParamInfo, ParamSpec, placed

if TYPE_CHECKING:
    from ppfleetx.config.sections.compress import Form, QuantizationConfig
    from ppfleetx.config.sections.lora import LoraConfig
    from ppfleetx.nn.attention_strategy import AttentionStrategy
    from ppfleetx.nn.expert_exchange import ExpertExchange
    from ppfleetx.nn.layer_spec import LinearSpec, NormSpec, TableSpec
    from ppfleetx.nn.matmul import Matmul
    from ppfleetx.nn.mlp_spec import GroupedLinearSpec

NameOf = Callable[[str], str]
"""A function that returns the canonical name of the item at a path within a layer."""

_ALONE = Mesh()

Finish = Callable[[nn.Layer, NameOf], None]
"""A function that extends a new layer before its parameters get names and values."""


@dataclass(frozen=True)
class Tie:
    """A sub-layer shared by all stages with the same ``key``: their ``attribute`` is one object.

    ``key`` is also its canonical name: the parameters of the shared sub-layer are named ``{key}.weight`` in
    every stage. The sub-layer only holds shared parameters, so that a pipeline's copy on another rank has no
    parameter without a gradient.
    """

    key: str
    attribute: str


@dataclass(frozen=True)
class Stage:
    """The recipe of one layer of the model.

    Attributes:
        name: unique name, e.g. ``decoder.layers.3``.
        layer_cls: the layer's class. ``forward(state, cache=None)`` maps a tuple of tensors to a tuple of
            tensors (the last stage: to one tensor).
        kwargs: arguments of the class.
        tie: sub-layer shared with other stages.
        wraps: whether the layer only holds a sub-layer with the stage's own name. The parameters of stage
            ``head`` are then named ``head.weight``, not ``head.head.weight``.
        finish: called with the new layer before its parameters get names and values; may extend it.
    """

    name: str
    layer_cls: type[nn.Layer]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tie: Tie | None = None
    wraps: bool = False
    finish: Finish | None = None

    def extended(self, extend: Finish) -> Stage:
        """A copy whose new layer goes to ``extend`` first, and then to the present ``finish``."""
        return replace(self, finish=partial(_finish_both, extend, self.finish))


def _finish_both(first: Finish, then: Finish | None, layer: nn.Layer, name_of: NameOf) -> None:
    first(layer, name_of)
    if then is not None:
        then(layer, name_of)


class LayerFactory(Protocol):
    """Makes the layers whose parameters a parallel plan may slice. Callers give global sizes.

    The factory declares every parameter it makes (:func:`declare`), without a name. Blocks never ask for a
    degree; they ask :meth:`local_count` how many of a number of equal parts this rank has.

    Attributes:
        attention: strategy for attention over whole sequences.
        group: ranks that share the columns of logits; None: this rank has all of them.
        sequence_parallel: whether tensor-parallel ranks see different positions of the hidden states.
        fused: the fused operators that its layers use.
        matmul: computes the products with the weights of its layers.
        keeps_weights: whether weights keep their values and memory after their first use.
        experts: brings rows of hidden states to the ranks of their experts, and back.
        hidden_same_on: the axes, among those that share a micro batch, whose ranks hold the same hidden
            states.
    """

    attention: AttentionStrategy
    sequence_parallel: bool
    keeps_weights: bool
    fused: FusedOps
    matmul: Matmul
    experts: ExpertExchange
    hidden_same_on: tuple[str, ...]
    group: Any

    def local_count(self, count: int, what: str) -> int:
        """How many of ``count`` equal parts are on this rank; ``what`` names them ("key/value heads")."""

    def declare(self, parameter: paddle.Tensor, spec: ParamSpec) -> None:
        """Declare a parameter that a layer created itself, with the shape it has on this rank."""

    def linear(self, spec: LinearSpec) -> nn.Layer:
        """Make the declared linear; see :class:`LinearSpec` for how it is sliced."""

    def grouped_linear(self, spec: GroupedLinearSpec) -> nn.Layer:
        """Make this rank's part of the declared linears of experts."""

    def quantizer(self, linear: nn.Layer, cfg: QuantizationConfig, *, follows: bool) -> nn.Layer:
        """Make the :class:`~ppfleetx.nn.fake_quant.FakeQuantizer` of a linear; with ``follows``, training
        moves its scale."""

    def lora(self, linear: nn.Layer, cfg: LoraConfig) -> nn.Layer:
        """Make an adapter, sliced like its linear, that maps the linear's input to its output."""

    def quantized_linear(self, linear: nn.Layer, form: Form) -> nn.Layer:
        """Make the quantized replacement of a linear, with weights stored in ``form``."""

    def quantized_embedding(self, embedding: nn.Layer, form: Form) -> nn.Layer:
        """Make the quantized replacement of a word embedding, with rows stored in 8 bits."""

    def embedding(self, spec: TableSpec) -> nn.Layer:
        """Make the declared table; its output is whole."""

    def norm(self, spec: NormSpec) -> nn.Layer:
        """Make the declared norm."""

    def dropout(self, probability: float, *, inside_heads: bool = False) -> nn.Layer:
        """Make a dropout layer; ``inside_heads`` if its input is sliced over heads, so that masks must
        differ by rank."""

    def enter_trunk(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Turn whole ``[s, b, h]`` into the blocks' input: under sequence parallelism, this rank's part of
        ``s``."""

    def leave_trunk(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Turn the blocks' output into whole ``[s, b, h]``, for layers that all ranks compute in the same
        way."""

    def enter_head(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Turn hidden states ``[s, b, h]`` into the head's input, which has all positions of the rank."""

    def tied_logits(self, hidden: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Multiply hidden states by the transposed word embedding ``[V, h]``; the columns stay sliced."""

    def local_positions(self, ids: paddle.Tensor) -> paddle.Tensor:
        """Return the positions of ``[b, s]`` on this rank (its part of ``s`` under sep)."""

    def sum_over_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        """Turn sums over this rank's positions into sums over whole sequences, in float32.

        A loss computed from them is the same along the axes ``mp`` and ``sep``.
        """

    def all_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        """Gather ``[s, ...]`` of this rank's positions over whole sequences; no gradient passes."""

    def own_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        """Return this rank's positions: the inverse of :meth:`all_positions`."""

    def token_loss(
        self, logits: paddle.Tensor, labels: paddle.Tensor, loss_mask: paddle.Tensor, true_vocab: int
    ) -> LossOutput:
        """:func:`ppfleetx.nn.loss.token_loss` for the head's output: logits of this rank's positions, with
        sliced columns. The sum is the same on all ranks that share the columns."""

    def token_scores(
        self, logits: paddle.Tensor, labels: paddle.Tensor, mask: paddle.Tensor, true_vocab: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """:func:`ppfleetx.nn.token_scores.token_scores` for the head's output, like :meth:`token_loss`."""


def build_stage(
    stage: Stage,
    seed: int | None,
    shared: MutableMapping[str, nn.Layer] | None = None,
    *,
    empty: bool = False,
) -> nn.Layer:
    """Build one stage: canonical names on its parameters, initial values from (seed, name).

    Args:
        seed: None: no values are drawn, because a checkpoint provides them.
        shared: tied sub-layers built so far in this process, by key. A stage uses the sub-layer with its key
            if there is one, and otherwise adds its own.
        empty: parameters have names, shapes and types, but no memory; nothing is drawn.
    """
    kwargs = dict(stage.kwargs)
    known = stage.tie is not None and shared is not None and stage.tie.key in shared
    if known:
        kwargs[stage.tie.attribute] = shared[stage.tie.key]
    layer = stage.layer_cls(**kwargs)
    if stage.finish is not None:
        stage.finish(layer, partial(_canonical_name, stage))
    if stage.tie is not None and shared is not None:
        shared[stage.tie.key] = getattr(layer, stage.tie.attribute)
    for path, parameter in layer.named_parameters():
        if parameter.info.name:  # made, named and filled by the stage it is shared with
            continue
        _name(parameter, stage, path)
        if empty:
            parameter._clear_data()
        elif seed is not None:
            parameter.set_value(first_value(parameter, seed).astype(parameter.dtype))
    return layer


def declare(parameter: paddle.Tensor, spec: ParamSpec, mesh: Mesh = _ALONE, rank: int = 0) -> None:
    """Attach the declaration ``spec`` to a parameter, and as ``info`` the slice of it that ``rank`` holds."""
    info = placed(spec, mesh, rank)
    assert tuple(parameter.shape) == info.local_shape, f"{parameter.shape} is made, {info} is declared"
    parameter.spec, parameter.info = spec, info
    parameter.is_distributed = "mp" not in spec.view.axes or spec.placement("mp") != REPLICATE  # fleet's mark


def _name(parameter: paddle.Tensor, stage: Stage, path: str) -> None:
    name, tie = _canonical_name(stage, path), stage.tie
    is_tied = tie is not None and path.startswith(f"{tie.attribute}.")
    spec = replace(parameter.spec, name=name, trains=not parameter.stop_gradient)
    if is_tied:
        spec = replace(spec, tie=tie.key, grad={**spec.grad, "pp": PARTIAL})
    parameter.spec, parameter.info = spec, replace(parameter.info, name=name)


def first_value(parameter: paddle.Tensor, seed: int) -> paddle.Tensor:
    """Draw the initial values, in float32, of a parameter that has its named ``info``."""
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
    """A hook for a frozen first layer: its output still requires a gradient, because recomputation, pipelines
    and sharding stage 3 rely on it."""
    if layer.training and paddle.is_grad_enabled():
        state[0].stop_gradient = False
    return state


def canonical_parameters(layer: nn.Layer) -> dict[str, paddle.Tensor]:
    """Return the parameters of a layer or container by canonical name; a tied one appears once."""
    return {parameter.info.name: parameter for parameter in layer.parameters()}
