"""Fake quantization: tensors are rounded to integers times a scale, with straight-through gradients (Bengio
et al., 2013)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from ppfleetx.config.sections.compress import QUANTIZER
from ppfleetx.nn.lora_and_quant_specs import quantizer_parameter_names
from ppfleetx.nn.panel_matmul import InferenceLinear
from ppfleetx.nn.stage import LayerFactory, NameOf, Stage, ask_for_gradient

if TYPE_CHECKING:
    from ppfleetx.config.sections.compress import QuantizationConfig

_SMALLEST = 1.1754944e-38  # the smallest normal number, as the scale of an all-zero tensor
_LEAST_SHARE = 0.01  # lower limit of a learned clipping factor

Reduce = Callable[[paddle.Tensor], paddle.Tensor]
"""A function that takes elementwise maxima, in place, over the ranks that hold parts of a tensor."""


def levels_of(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def on_grid(
    x: paddle.Tensor, bound: paddle.Tensor, bits: int, *, reaches_beyond: bool = True
) -> paddle.Tensor:
    """Round each element of ``x`` to the nearest of ``2^bits - 1`` equidistant values from ``-bound`` to
    ``bound``.

    Args:
        x: any shape and floating type.
        bound: float32, broadcast to ``x``; gets no gradient.
        bits: 2 to 16.
        reaches_beyond: whether elements of ``x`` can exceed the bound. These elements are clipped, and get no
            gradient.
    """
    if _has_no_gradient(x):
        return _rounded(x, bound, bits, reaches_beyond)
    return _StraightThrough.apply(x, bound, bits, reaches_beyond)


def on_learned_grid(x: paddle.Tensor, bound: paddle.Tensor, share: paddle.Tensor, bits: int) -> paddle.Tensor:
    """Round each element of ``x`` to the nearest of ``2^bits - 1`` equidistant values from ``-limit`` to
    ``limit``, where ``limit = bound * max(share, 0.01)``. Elements of larger magnitude are clipped.

    Args:
        bound: float32, broadcast to ``x``; gets no gradient.
        share: ``[1]``, a learned clipping factor. Its gradient comes from the clipped elements (PACT: Choi et
            al., 2018).
    """
    if _has_no_gradient(x) and _has_no_gradient(share):
        return _rounded(x, bound * share.clip(min=_LEAST_SHARE), bits, True)
    return _LearnedClip.apply(x, share, bound, bits)


def _has_no_gradient(x: paddle.Tensor) -> bool:
    return x.stop_gradient or not paddle.in_dynamic_mode() or not paddle.is_grad_enabled()


def _rounded(x: paddle.Tensor, bound: paddle.Tensor, bits: int, reaches_beyond: bool) -> paddle.Tensor:
    levels = levels_of(bits)
    scale = (bound / levels).clip(min=_SMALLEST)
    integers = paddle.round(x.astype("float32") / scale)
    if reaches_beyond:
        integers = integers.clip(-levels, levels)
    return (integers * scale).astype(x.dtype)


# The backward passes below read no parameters, because sharding stage 3 can free parameters before them.


class _StraightThrough(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, bound: paddle.Tensor, bits: int, reaches_beyond: bool
    ) -> paddle.Tensor:
        ctx.within = x.abs().astype("float32") <= bound if reaches_beyond else None
        return _rounded(x, bound, bits, reaches_beyond)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor, None]:
        if ctx.within is None:
            return upstream, None
        return upstream * ctx.within.astype(upstream.dtype), None


class _LearnedClip(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, share: paddle.Tensor, bound: paddle.Tensor, bits: int
    ) -> paddle.Tensor:
        limit = bound * share.clip(min=_LEAST_SHARE)
        values = x.astype("float32")
        ctx.beyond = (values >= limit).astype(x.dtype) - (values <= -limit).astype(x.dtype)
        ctx.bound, ctx.wanted = bound.clone(), (not x.stop_gradient, not share.stop_gradient)
        return _rounded(x, limit, bits, True)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        for_x, for_share = ctx.wanted
        cut = upstream * ctx.beyond
        gradient = (cut.astype("float32") * ctx.bound).sum().reshape([1]) if for_share else None
        return (upstream - cut * ctx.beyond) if for_x else None, gradient, None


def unreduced(maxima: paddle.Tensor) -> paddle.Tensor:
    """Return ``maxima`` unchanged: no reduction, because this rank holds the whole tensor."""
    return maxima


class FakeQuantizer(nn.Layer):
    """Rounds the weight and the input of one linear.

    Args:
        cfg: the section ``Compress.Quantization``.
        over_weight: function that reduces the weight's largest magnitudes to their maximum over the ranks
            whose slices of the weight share a scale.
        over_input: function that reduces the input's largest magnitudes to their maximum over the ranks that
            slice the input features.
        follows: whether training updates ``input_scale``.
        keeps: whether to cache the rounded weight. Weights must then not change after their first use.

    Attributes:
        input_scale: ``[1]``, moving average of the input's largest magnitude; None if not configured. It is 0
            until its first update; until then, inputs are not rounded.
        weight_clip, input_clip: ``[1]``, learned clipping factors; None if not configured.
    """

    def __init__(
        self,
        cfg: QuantizationConfig,
        *,
        over_weight: Reduce = unreduced,
        over_input: Reduce = unreduced,
        follows: bool = True,
        keeps: bool = False,
    ) -> None:
        super().__init__()
        self.cfg, self.follows, self.keeps = cfg, follows, keeps
        self._over_weight, self._over_input = over_weight, over_input
        self.input_scale = self._number("input_scale", 0.0)
        self.weight_clip, self.input_clip = (self._number(f"{of}_clip", 1.0) for of in ("weight", "input"))
        if self.input_scale is not None:
            self.input_scale.stop_gradient = True
            if self.input_clip is not None:
                self.input_clip.is_idle = True
        self._has_scale = False
        self._largest: paddle.Tensor | None = None
        self._bound: paddle.Tensor | None = None
        self._kept: paddle.Tensor | None = None

    def _number(self, name: str, value: float) -> paddle.Tensor | None:
        if name not in quantizer_parameter_names(self.cfg):
            return None
        return self.create_parameter([1], dtype="float32", default_initializer=nn.initializer.Constant(value))

    # -- the tensors that the linear uses

    def weight(self, weight: paddle.Tensor) -> paddle.Tensor:
        """Fake-quantize this rank's slice of ``weight``, ``[in, out]`` or ``[experts, in, out]``."""
        if self._kept is not None:
            return self._kept
        bound = self._weight_bound(weight)
        if self.weight_clip is None:
            rounded = on_grid(weight, bound, self.cfg.weight_bits, reaches_beyond=False)
        else:
            rounded = on_learned_grid(weight, bound, self.weight_clip, self.cfg.weight_bits)
        if self.keeps and paddle.in_dynamic_mode() and rounded.stop_gradient:
            self._kept = rounded
        return rounded

    def input(self, x: paddle.Tensor) -> paddle.Tensor:
        """Fake-quantize the linear's input ``[..., in]``, or this rank's slice of it."""
        bound = self._input_bound(x)
        if bound is None:
            return x
        if self.input_clip is None:
            return on_grid(x, bound, self.cfg.activation_bits)
        return on_learned_grid(x, bound, self.input_clip, self.cfg.activation_bits)

    @paddle.no_grad()
    def _weight_bound(self, weight: paddle.Tensor) -> paddle.Tensor:
        if self._bound is None or not paddle.in_dynamic_mode():
            magnitudes = weight.detach().abs().astype("float32")
            per_channel = self.cfg.weight_quantize_type == "channel_wise_abs_max"
            if magnitudes.ndim == 3:  # a separate bound for each expert
                bound = magnitudes.max(axis=1 if per_channel else [1, 2], keepdim=True)
            else:
                bound = self._over_weight(magnitudes.max(axis=0) if per_channel else magnitudes.max())
            if not paddle.in_dynamic_mode():
                return bound
            self._bound = bound
        return self._bound

    @paddle.no_grad()
    def _input_bound(self, x: paddle.Tensor) -> paddle.Tensor | None:
        x = x.detach()
        if self.input_scale is None:
            return self._over_input(x.abs().max(axis=-1, keepdim=True).astype("float32"))
        if self.training and self.follows and x.size:  # x is empty if no position chose this rank's experts
            # Recomputation takes the maximum of the same values again, which does not change the result.
            largest = x.abs().max().astype("float32")
            self._largest = largest if self._largest is None else paddle.maximum(self._largest, largest)
        if not self._has_scale:
            self._has_scale = self._parameters["input_scale"].item() > 0  # the value, also in a program
            if not self._has_scale:  # no input has been seen, so inputs are not rounded yet
                return None
            if self.input_clip is not None:
                self.input_clip.is_idle = False
        return self.input_scale.detach()

    # -- from step to step

    def begin(self) -> None:
        """Forget the largest input magnitude and the cached bound of the weight. This must be called before
        each step."""
        self._bound = self._largest = None

    def take_largest(self) -> paddle.Tensor:
        """Return the largest input magnitude since the last call, as a scalar tensor, and reset it to 0."""
        largest, self._largest = self._largest, None
        return paddle.zeros([]) if largest is None else largest

    @paddle.no_grad()
    def follow(self, largest: paddle.Tensor) -> None:
        """Update the moving average ``input_scale`` with ``largest``, the largest input magnitude of a global
        batch."""
        if not self.input_scale._is_initialized():
            return  # sharding stage 3: only the owner has the value
        rate, scale = self.cfg.moving_rate, self.input_scale.detach()
        moved = paddle.where(scale > 0, rate * scale + (1 - rate) * largest, largest)
        self.input_scale.set_value(moved.reshape([1]))


def quantize_linear(linear: nn.Layer, quantizer: FakeQuantizer) -> None:
    """Attach ``quantizer`` to ``linear``, which then rounds its input and its weight before the matmul."""
    linear.add_sublayer(QUANTIZER, quantizer)
    linear.register_forward_pre_hook(_round)
    linear.register_forward_post_hook(_restore)


def _round(linear: nn.Layer, inputs: tuple[paddle.Tensor, ...]) -> tuple[paddle.Tensor, ...]:
    quantizer: FakeQuantizer = linear.quant
    # In an exported program, only the attribute gives a variable of the program.
    own = linear._parameters["weight"] if paddle.in_dynamic_mode() else linear.weight
    weight = quantizer.weight(own)
    linear.__dict__["weight"] = weight  # attribute lookup finds this before the parameter
    if isinstance(linear, InferenceLinear):
        linear.use(weight)
    return (quantizer.input(inputs[0]), *inputs[1:])


def _restore(linear: nn.Layer, inputs: tuple[paddle.Tensor, ...], output: paddle.Tensor) -> None:
    del linear.__dict__["weight"]


def with_quantizers(
    stages: Sequence[Stage], cfg: QuantizationConfig, factory: LayerFactory, *, follows: bool
) -> list[Stage]:
    """Return ``stages`` with fake quantizers on the linears that ``cfg`` selects, and with frozen embeddings
    if configured. If ``follows`` is True, training updates the input scales."""
    quantize = partial(_quantize, cfg=cfg, factory=factory, follows=follows)
    stages = [stage.extended(quantize) for stage in stages]
    if not cfg.freeze_embedding:
        return stages
    first, *rest = stages
    return [first.extended(_freeze_first), *(s if s.tie is None else s.extended(_freeze) for s in rest)]


def _quantize(
    layer: nn.Layer, name_of: NameOf, *, cfg: QuantizationConfig, factory: LayerFactory, follows: bool
) -> None:
    for path, linear in list(layer.named_sublayers()):
        kind = getattr(linear, "kind", None)
        if kind is not None and cfg.quantizes(name_of(path), kind):
            quantize_linear(linear, factory.quantizer(linear, cfg, follows=follows))


def _freeze(layer: nn.Layer, _: NameOf) -> None:
    for parameter in layer.parameters():
        parameter.stop_gradient = True


def _freeze_first(layer: nn.Layer, name_of: NameOf) -> None:
    """Freeze the embedding, the first layer of the model. Its output must still require a gradient, because
    recomputation needs one."""
    _freeze(layer, name_of)
    layer.register_forward_post_hook(ask_for_gradient)


def quantizers_of(layer: nn.Layer) -> list[FakeQuantizer]:
    return [one for one in layer.sublayers(include_self=True) if isinstance(one, FakeQuantizer)]
