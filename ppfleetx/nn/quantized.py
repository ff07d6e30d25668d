"""Layers with weights stored in 8 or 4 bits, for inference and for training adapters (Dettmers et al.,
"QLoRA", 2023).

Parameters of a linear ``[in, out]`` whose input features are divided into groups:

- ``weight`` in 8 bits: int8 ``[in, out]``
- ``weight`` in 4 bits: uint8 ``[in / 2, out]``, two's complement; each byte holds an even input feature in
  its low half, and the next input feature in its high half
- ``scale``, symmetric: float32 ``[groups, out]``
- ``scale``, asymmetric: float16 ``[2 * groups, out]``, scale and offset of each group alternating; a weight
  is ``integer * scale + offset``

A word embedding ``[rows, width]`` has ``weight`` int8 ``[rows, width]``. Its ``scale`` is ``[rows, 1]`` or,
if asymmetric, ``[rows, 2 * groups]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer
from paddle.nn.quant import weight_only_linear, weight_quantize

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.compress import Form, WeightsConfig
from ppfleetx.distributed.device import capability, on_gpu
from ppfleetx.nn.cpu_ops import quantized as cpu_ops
from ppfleetx.nn.layers import add_smaller, local_rows
from ppfleetx.nn.lora_and_quant_specs import MATRICES, codes, num_scales, row_scales, scales
from ppfleetx.nn.matmul import Counts
from ppfleetx.nn.panel_matmul import PanelMatrix, use_huge_pages
from ppfleetx.nn.param_spec import ParamSpec
from ppfleetx.nn.stage import LayerFactory, NameOf, Stage, declare

_LEVELS, _SMALLEST_SCALE = 127.0, 1.17549435e-38
_GPU_ARCHS = (70, 75, 80, 86, 89, 90, 92, 100)
_GPU_MULTIPLE = 64  # the GPU kernel needs input and output features that are multiples of this
_ZEROS = nn.initializer.Constant(0.0)


def unpack(packed: paddle.Tensor) -> paddle.Tensor:
    """Unpack 4-bit integers, two in each byte of ``packed [in / 2, out]``, to ``[in, out]`` float32."""
    pairs = paddle.cast(packed, "float32")
    high = (pairs / 16).floor()
    halves = paddle.stack([pairs - high * 16, high], axis=1).reshape([-1, packed.shape[1]])
    return halves - (halves > 7).astype("float32") * 16


class QuantizedMatrix:
    """A constant matrix of 8-bit or 4-bit integers and scales, in the format that the docstring of
    :mod:`ppfleetx.nn.quantized` describes."""

    def __init__(self, weight: paddle.Tensor, scale: paddle.Tensor, form: Form) -> None:
        self.weight, self.scale, self.form = weight, scale, form
        self._panels: tuple[paddle.Tensor, paddle.Tensor] | None = None
        self._widened: PanelMatrix | None = None
        self._of_gpu: tuple[paddle.Tensor, paddle.Tensor] | None = None

    @property
    def in_features(self) -> int:
        return self.weight.shape[0] * (2 if self.form.bits == 4 else 1)

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]

    @property
    def rounds_activations(self) -> bool:
        return self.form.activation_bits is not None

    @property
    def _rounds_rows(self) -> bool:
        """Whether the matmul can multiply the integers of both operands, and apply the scales afterwards.
        This requires rounded inputs, and a matrix with one scale per column and no offsets."""
        return self.rounds_activations and self.form.group_size is None and not self.form.asymmetric

    def integers(self) -> paddle.Tensor:
        """Return the stored integers as ``[in, out]`` float32, not multiplied by the scales."""
        return unpack(self.weight) if self.form.bits == 4 else paddle.cast(self.weight, "float32")

    def dequantized(self) -> paddle.Tensor:
        """Return the matrix ``[in, out]`` in float32."""
        scale = paddle.cast(self.scale, "float32")
        if self.form.asymmetric:
            scale, offset = scale[0::2], scale[1::2]
        groups = scale.shape[0]
        if groups == 1 and not self.form.asymmetric:
            return paddle.multiply(self.integers(), scale)
        grouped = self.integers().reshape([groups, -1, self.out_features])
        scaled = paddle.multiply(grouped, paddle.unsqueeze(scale, 1))
        if self.form.asymmetric:
            scaled = paddle.add(scaled, paddle.unsqueeze(offset, 1))
        return scaled.reshape([-1, self.out_features])

    def make_panels(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Convert the integers and scales to the layout of the CPU operators
        (:mod:`ppfleetx.nn.cpu_ops.quantized`)."""
        if self.form.bits == 4:
            values = cpu_ops.int4_panels(self.weight)
        else:
            values = (cpu_ops.int8_quads if self.rounds_activations else cpu_ops.int8_panels)(self.weight)
        return values, cpu_ops.scale_panels(self.scale)

    def panels(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the result of :meth:`make_panels`, which is cached at the first call."""
        if self._panels is None:
            self._panels = tuple(panel.contiguous() for panel in self.make_panels())
            use_huge_pages(self._panels[0])
        return self._panels

    @property
    def panel_format(self) -> str:
        """Name of the format of :meth:`panels`, one of :data:`~ppfleetx.nn.cpu_ops.fused_blocks.FORMATS`."""
        weights = "int4" if self.form.bits == 4 else "int8"
        return f"{weights}_int8" if self.rounds_activations else weights

    def multiply_panels(
        self, x: paddle.Tensor, panels: tuple[paddle.Tensor, paddle.Tensor], bias: paddle.Tensor | None
    ) -> paddle.Tensor:
        """Return ``x [..., in] @ matrix + bias``, computed by the CPU operators."""
        return cpu_ops.product(self.panel_format, x, *panels, bias, self.out_features)

    def has_operator(self, x: paddle.Tensor) -> bool:
        """Return whether the CPU operators can multiply ``x`` by this matrix."""
        if not x.place.is_cpu_place() or x.dtype != paddle.float32 or not cpu_ops.are_available():
            return False
        return not self.rounds_activations or self.in_features <= cpu_ops.MOST_INPUTS

    def linear(self, x: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        """Return ``x [..., in] @ matrix + bias``. Only ``x`` gets a gradient."""
        if _wants_gradient(x):
            product = _FrozenProduct.apply(x, self)
            return product if bias is None else add_smaller(product, bias)
        if self.has_operator(x):
            return self.multiply_panels(x, self.panels(), bias)
        arch = self._gpu_arch(x)
        if arch is not None:
            if self._of_gpu is None:  # in the kernel's layout, with one scale per channel
                wide = self.dequantized().astype(x.dtype)
                self._of_gpu = weight_quantize(wide, "weight_only_int8", arch)
            return weight_only_linear(x, self._of_gpu[0], bias, self._of_gpu[1], "int8", arch)
        if self._widened is None:
            self._widened = PanelMatrix(self.widened(x.dtype))
        if not self.rounds_activations:
            return self._widened.linear(x, bias)
        return self.rescaled(self._widened.linear, x, bias)

    def widened(self, dtype: Any = paddle.float32) -> paddle.Tensor:
        """Return the matrix ``[in, out]`` in floating point, for devices without an operator for its format.
        If inputs are rounded, use the result only in :meth:`rescaled`: it can be the integers, to which
        :meth:`rescaled` applies the scales after the matmul."""
        if self._rounds_rows and dtype == paddle.float32:
            return self.integers()
        return self.dequantized().astype(dtype)

    def rescaled(
        self,
        multiply: Callable[[paddle.Tensor], paddle.Tensor],
        x: paddle.Tensor,
        bias: paddle.Tensor | None,
    ) -> paddle.Tensor:
        """Return ``x @ matrix + bias`` after rounding ``x`` to 8 bits.

        Args:
            multiply: function that multiplies its argument by the result of :meth:`widened`.
        """
        if self._rounds_rows and x.dtype == paddle.float32:
            integers, step = round_rows(x)
            product = multiply(integers) * paddle.multiply(step, self.scale)
        else:
            same = [0] * (x.ndim - 1)  # 0 keeps a dimension; its size is unknown while exporting
            grouped = x.reshape([*same, -1, self.form.group_size]) if self.form.group_size else x
            integers, step = round_rows(paddle.cast(grouped, "float32"))
            rounded = (integers * step).reshape([*same, self.in_features])
            product = multiply(paddle.cast(rounded, x.dtype))
        return product if bias is None else add_smaller(product, bias)

    def _gpu_arch(self, x: paddle.Tensor) -> int | None:
        """Return the GPU's compute capability (e.g. 80) if Paddle's 8-bit kernel can multiply ``x`` by the
        matrix, else None."""
        fits = self.in_features % _GPU_MULTIPLE == 0 and self.out_features % _GPU_MULTIPLE == 0
        if self.form.bits != 8 or self.rounds_activations or not fits or not on_gpu():
            return None
        if x.dtype not in (paddle.float16, paddle.bfloat16):
            return None
        major, minor = capability(paddle.get_device())
        return arch if (arch := 10 * major + minor) in _GPU_ARCHS else None


def round_rows(x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Quantize each row of float32 ``x [..., in]`` to 8 bits. Return the integers, stored as float32, and the
    scales ``[..., 1]``."""
    step = (x.abs().max(axis=-1, keepdim=True) / _LEVELS).clip(min=_SMALLEST_SCALE)
    return (x / step).round(), step


def _wants_gradient(x: paddle.Tensor) -> bool:
    return paddle.in_dynamic_mode() and not x.stop_gradient and paddle.is_grad_enabled()


class _FrozenProduct(PyLayer):
    """Autograd function of a matmul with a quantized matrix. Only ``x`` gets a gradient, as if it had not
    been rounded."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, matrix: QuantizedMatrix) -> paddle.Tensor:
        ctx.matrix, ctx.dtype = matrix, x.dtype
        wide = matrix.widened(x.dtype)
        if not matrix.rounds_activations:
            return paddle.matmul(x, wide)
        return matrix.rescaled(lambda integers: paddle.matmul(integers, wide), x, None)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        wide = ctx.matrix.dequantized().astype(upstream.dtype)
        return paddle.matmul(upstream, wide, transpose_y=True).astype(ctx.dtype)


Declare = Callable[[paddle.Tensor, ParamSpec], None]
"""A function that attaches a declaration to a new parameter."""


class QuantizedLinear(nn.Layer):
    """A linear layer with a :class:`QuantizedMatrix`.

    Args:
        linear: the linear to replace.
        form: quantization format of the matrix (bits, group size, asymmetric or not).
        enter, leave: functions that communicate: ``enter`` is applied to the input, ``leave`` to the output
            before the bias is added. None: no communication.

    Attributes:
        spec: declaration of the matrix ``[in, out]`` before quantization.

    Raises:
        ConfigError: the group size does not divide the input features on this rank.
    """

    def __init__(
        self,
        linear: nn.Layer,
        form: Form,
        *,
        declare: Declare = declare,
        enter: Callable[[paddle.Tensor], paddle.Tensor] | None = None,
        leave: Callable[[paddle.Tensor], paddle.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.bias, self.enter, self.leave = linear.bias, enter, leave
        self.spec: ParamSpec = linear.weight.spec
        self.weight, self.scale = _make_parameters(self, linear.weight, form, declare)
        self.matrix = QuantizedMatrix(self.weight, self.scale, form)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x if self.enter is None else self.enter(x)
        if self.leave is None:
            return self.matrix.linear(x, self.bias)
        product = self.leave(self.matrix.linear(x))
        return product if self.bias is None else add_smaller(product, self.bias)


class QuantizedGroupedLinear(nn.Layer):
    """The quantized linears of all experts: :class:`QuantizedLinear` with a leading dimension for experts."""

    def __init__(self, linear: nn.Layer, form: Form, *, declare: Declare = declare) -> None:
        super().__init__()
        self.bias, self.form = linear.bias, form
        self.spec: ParamSpec = linear.weight.spec
        self.weight, self.scale = _make_parameters(self, linear.weight, form, declare)
        self._matrices: dict[int, QuantizedMatrix] = {}

    def forward(self, x: paddle.Tensor, counts: Counts, *, adds_bias: bool = True) -> paddle.Tensor:
        """Map ``x [rows, in]``, sorted by expert, to ``[rows, out]``. ``counts`` has the number of rows of
        each expert."""
        if not x.shape[0]:
            return paddle.zeros([0, self.weight.shape[-1]], x.dtype)
        end, parts = 0, []
        for expert, count in enumerate(map(int, counts)):
            begin, end = end, end + count
            if count:
                bias = self.bias[expert] if adds_bias and self.bias is not None else None
                parts.append(self._matrix(expert).linear(x[begin:end], bias))
        return paddle.concat(parts)

    def _matrix(self, expert: int) -> QuantizedMatrix:
        """Return the quantized matrix of one expert, which is cached at the first call. The stored weights
        must not change afterwards."""
        if expert not in self._matrices:
            stored = self.weight[expert], self.scale[expert]
            self._matrices[expert] = QuantizedMatrix(*stored, self.form)
        return self._matrices[expert]


class QuantizedEmbedding(nn.Layer):
    """A word embedding stored in 8 bits. Under tensor parallelism, it holds this rank's rows.

    Args:
        form: quantization format of the table (group size, asymmetric or not).
        join: sums the results of the ranks; None: this rank holds all rows.
    """

    def __init__(
        self,
        embedding: nn.Layer,
        form: Form,
        *,
        declare: Declare = declare,
        join: Callable[[paddle.Tensor], paddle.Tensor] | None = None,
    ) -> None:
        super().__init__()
        spec, info = embedding.weight.spec, embedding.weight.info
        self.join, self.form, self.num_rows = join, form, info.local_shape[0]
        self.rank = info.offset[0] // self.num_rows
        of_scale = row_scales(spec, form)
        self.weight = _parameter(self, info.local_shape, "int8")
        self.scale = _parameter(self, [self.num_rows, of_scale.shape[1]], of_scale.dtype)
        declare(self.weight, codes(spec))
        declare(self.scale, of_scale)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        if self.join is None:
            return self._rows(tokens)
        rows, is_here = local_rows(tokens, self.num_rows, self.rank)
        found = self._rows(rows)
        return self.join(found * is_here.astype(found.dtype))

    def _rows(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self._scaled(F.embedding(ids, self.weight), F.embedding(ids, self.scale))

    def dequantized(self) -> paddle.Tensor:
        """Return this rank's rows of the word-embedding table in floating point."""
        return self._scaled(self.weight, self.scale)

    def _scaled(self, integers: paddle.Tensor, scale: paddle.Tensor) -> paddle.Tensor:
        if self.form.asymmetric:
            shape = integers.shape
            pairs = paddle.cast(scale, "float32").reshape([*shape[:-1], -1, 2])
            grouped = paddle.cast(integers, "float32").reshape([*shape[:-1], pairs.shape[-2], -1])
            rows = (grouped * pairs[..., :1] + pairs[..., 1:]).reshape(shape)
        else:
            rows = integers.astype(scale.dtype) * scale
        dtype = getattr(self.weight, "compute_dtype", None)
        return rows if dtype is None else rows.astype(dtype)

    def head_matrix(self, vocab_size: int | None) -> QuantizedMatrix:
        """Return the transposed table ``[width, columns]`` as the matrix of a tied head.

        Args:
            vocab_size: number of columns to keep; None: all.
        """
        weight, scale = (tensor[:vocab_size].transpose([1, 0]).contiguous() for tensor in self.parameters())
        return QuantizedMatrix(weight, scale, self.form)


def with_quantized_weights(
    stages: Sequence[Stage], cfg: WeightsConfig | None, factory: LayerFactory
) -> list[Stage]:
    """Return ``stages`` with linears and the word embedding quantized according to ``cfg``, the section
    ``Compress.Weights``. If ``cfg`` is None, return the stages unchanged."""
    if cfg is None:
        return list(stages)
    put = partial(_replace, cfg=cfg, factory=factory)
    # Adapters are attached later, by ``finish``, and therefore to the new layers.
    return [stage.extended(put) for stage in stages]


def _replace(layer: nn.Layer, name_of: NameOf, *, cfg: WeightsConfig, factory: LayerFactory) -> None:
    for path, child in list(layer.named_sublayers()):
        weight = getattr(child, "weight", None)
        kind = getattr(getattr(weight, "info", None), "kind", None)
        is_quantized = isinstance(child, QuantizedEmbedding | QuantizedLinear | QuantizedGroupedLinear)
        if kind not in MATRICES or is_quantized:
            continue
        form = cfg.form_of(name_of(f"{path}.weight").removesuffix(".weight"))
        if form is None:
            continue
        made = (
            factory.quantized_embedding(child, form)
            if kind == "word_embedding"
            else factory.quantized_linear(child, form)
        )
        above, _, own = path.rpartition(".")
        parent = layer.get_sublayer(above) if above else layer
        setattr(parent, own, made)


def _parameter(layer: nn.Layer, shape: Sequence[int], dtype: str) -> paddle.Tensor:
    parameter = layer.create_parameter(list(shape), dtype=dtype, default_initializer=_ZEROS)
    parameter.stop_gradient = parameter.is_quantized = True
    return parameter


def _make_parameters(
    layer: nn.Layer, matrix: paddle.Tensor, form: Form, declare: Declare
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Create the parameters that store the integers and the scales of a matrix ``[in, out]`` or
    ``[experts, in, out]``."""
    *experts, rows, columns = matrix.shape
    whole = matrix.spec.shape[-2]
    if form.group_size is not None and rows % form.group_size:
        parts = f"; Distributed.mp_degree leaves {rows} of {whole} to a rank" if rows < whole else ""
        raise ConfigError(
            f"groups of {form.group_size} do not divide {rows} input features{parts}",
            key="Compress.Weights.group_size",
            value=form.group_size,
        )
    per_row = 2 if form.bits == 4 else 1
    of_codes, of_scales = codes(matrix.spec, per_row), scales(matrix.spec, form)
    weight = _parameter(layer, [*experts, rows // per_row, columns], of_codes.dtype)
    scale = _parameter(layer, [*experts, num_scales(rows, form), columns], of_scales.dtype)
    declare(weight, of_codes)
    declare(scale, of_scales)
    return weight, scale
