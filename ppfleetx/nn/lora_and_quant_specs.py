"""Parameter declarations of a model with adapters, fake quantization or quantized weights. Does not import
Paddle. The layers are in ``nn/lora.py``, ``nn/fake_quant.py`` and ``nn/quantized.py``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ppfleetx.config.sections.compress import (
    QUANTIZER,
    CompressConfig,
    Form,
    QuantizationConfig,
    WeightsConfig,
)
from ppfleetx.config.sections.lora import LoraConfig
from ppfleetx.nn.init import Constant, Init, Normal
from ppfleetx.nn.layer_spec import Specs, within
from ppfleetx.nn.param_spec import PARTIAL, REPLICATE, ParamSpec, Shard, dense

MATRICES = ("matrix", "head", "word_embedding")
"""The kinds of parameters that can be quantized."""
_KINDS = {
    ("mp", Shard(1)): "ColumnParallelLinear",
    ("mp", Shard(0)): "RowParallelLinear",
    ("emp", Shard(2)): "ColumnParallelLinear",
    ("emp", Shard(1)): "RowParallelLinear",
}


def transformed(
    specs: Mapping[str, ParamSpec], lora: LoraConfig | None, compress: CompressConfig | None
) -> Mapping[str, ParamSpec]:
    """Return the declarations ``specs`` with the changes that ``Model.lora`` and the section ``Compress``
    require."""
    if compress is not None and compress.quantization is not None:
        specs = fake_quantized(specs, compress.quantization)
    if lora is not None:
        specs = adapted(specs, lora)
    if compress is not None and compress.Weights is not None:
        specs = quantized_weights(specs, compress.Weights)
    return specs


def adapted(specs: Mapping[str, ParamSpec], cfg: LoraConfig) -> Specs:
    """Return ``specs`` with low-rank adapters on the linears that ``cfg`` selects. All other parameters are
    frozen, except in a classification head."""
    result: Specs = {}
    for name, spec in specs.items():
        result[name] = replace(spec, trains=spec.trains and name.startswith("score."))
        linear = name.removesuffix(".weight")
        if linear != name and cfg.adapts(linear):
            result |= _named(f"{linear}.lora", adapter(spec, cfg.rank))
    return result


def fake_quantized(specs: Mapping[str, ParamSpec], cfg: QuantizationConfig) -> Specs:
    """Return ``specs`` with fake quantizers on the linears that ``cfg`` selects, and with a frozen embedding
    if configured."""
    result: Specs = {}
    for name, spec in specs.items():
        is_frozen = cfg.freeze_embedding and name.startswith("embedding.")
        result[name] = replace(spec, trains=False) if is_frozen else spec
        linear, kind = name.removesuffix(".weight"), linear_kind(spec)
        if linear != name and kind is not None and cfg.quantizes(linear, kind):
            result |= _named(f"{linear}.{QUANTIZER}", quantizer(spec, quantizer_parameter_names(cfg)))
    return result


def quantized_weights(specs: Mapping[str, ParamSpec], cfg: WeightsConfig) -> Specs:
    """Return ``specs`` with integers and scales in place of the parameters that ``cfg`` selects."""
    result: Specs = {}
    for name, spec in specs.items():
        layer = name.removesuffix(".weight")
        is_matrix = layer != name and spec.kind in MATRICES
        form = cfg.form_of(layer) if is_matrix else None
        if form is None:
            result[name] = spec
        elif spec.kind == "word_embedding":
            result |= _named(layer, {"weight": codes(spec), "scale": row_scales(spec, form)})
        else:
            per_row = 2 if form.bits == 4 else 1
            result |= _named(layer, {"weight": codes(spec, per_row), "scale": scales(spec, form)})
    return result


def _named(layer: str, specs: Specs) -> Specs:
    return {name: replace(spec, name=name) for name, spec in within(layer, specs).items()}


def adapter(matrix: ParamSpec, rank: int, *, sequence_parallel: bool = True) -> Specs:
    """Declare a low-rank adapter of ``matrix [in, out]``. Tensor parallelism slices the adapter's
    ``a [in, rank]`` if it slices the matrix's input features, and ``b [rank, out]`` if it slices the matrix's
    output features."""
    if len(matrix.shape) == 3:
        return _adapters_of_experts(matrix, rank)
    width_in, width_out = matrix.shape
    cut = matrix.placement("mp")
    a, b = (cut if cut == Shard(dim) else REPLICATE for dim in (0, 1))
    partial = matrix.sums("mp") if cut == REPLICATE else sequence_parallel
    init = Normal(1.0 / math.sqrt(width_in))  # x A has about the magnitude of x
    return {
        "a": dense((width_in, rank), init, "lora", mp=a, partial=partial and a == REPLICATE),
        "b": dense((rank, width_out), Constant(0.0), "lora", mp=b, partial=partial and b == REPLICATE),
    }


def _adapters_of_experts(matrix: ParamSpec, rank: int) -> Specs:
    """Declare the low-rank adapters of all experts, for ``matrix [experts, in, out]``."""
    experts, width_in, width_out = matrix.shape

    def of_experts(shape: tuple[int, ...], init: Init, dim: int) -> ParamSpec:
        emp = matrix.placement("emp") if matrix.placement("emp") == Shard(dim) else REPLICATE
        grad = {"edp": PARTIAL} if emp != REPLICATE else {"edp": PARTIAL, "emp": PARTIAL}
        return ParamSpec(shape, init, "lora", {"ep": Shard(0), "emp": emp}, grad)

    return {
        "a": of_experts((experts, width_in, rank), Normal(1.0 / math.sqrt(width_in)), 1),
        "b": of_experts((experts, rank, width_out), Constant(0.0), 2),
    }


def linear_kind(matrix: ParamSpec) -> str | None:
    """Return the layer type of a linear with this matrix: ``ColumnParallelLinear`` if tensor parallelism
    slices output features, ``RowParallelLinear`` if it slices input features, None if it slices neither.
    ``Compress.Quantization.quantizable_layer_type`` uses these names."""
    axis = matrix.view.tensor
    return _KINDS.get((axis, matrix.placement(axis)))


def quantizer_parameter_names(cfg: QuantizationConfig) -> tuple[str, ...]:
    """Return the names of the fake-quantizer parameters that ``cfg`` requires."""
    has = {
        "input_scale": cfg.activation_quantize_type == "moving_average_abs_max",
        "weight_clip": cfg.weight_preprocess_type is not None,
        "input_clip": cfg.activation_preprocess_type is not None,
    }
    return tuple(name for name, is_there in has.items() if is_there)


def quantizer(matrix: ParamSpec, names: Iterable[str], *, sequence_parallel: bool = True) -> Specs:
    """Declare the parameters ``names`` of the fake quantizer of ``matrix``. All experts of a layer share one
    fake quantizer."""
    if len(matrix.shape) == 3:
        return {name: _number_of_experts(name) for name in names}
    cut = matrix.placement("mp")
    partial = {"input_scale": False, "weight_clip": cut != REPLICATE or matrix.sums("mp")}
    partial["input_clip"] = matrix.sums("mp") if cut == REPLICATE else sequence_parallel or cut == Shard(0)
    specs = {name: dense((1,), _START[name], "quant", partial=partial[name]) for name in names}
    return {name: replace(spec, trains=name != "input_scale") for name, spec in specs.items()}


_START = {"input_scale": Constant(0.0), "weight_clip": Constant(1.0), "input_clip": Constant(1.0)}


def _number_of_experts(name: str) -> ParamSpec:
    grad = dict.fromkeys(("edp", "ep", "emp"), PARTIAL)
    return ParamSpec((1,), _START[name], "quant", grad=grad, trains=name != "input_scale")


def codes(matrix: ParamSpec, per_row: int = 1) -> ParamSpec:
    """Declare the parameter that stores the quantized integers of a frozen ``matrix``. Each row of the
    parameter packs ``per_row`` input features: 1 with 8 bits, 2 with 4 bits."""
    dtype = "int8" if per_row == 1 else "uint8"
    *experts, width_in, width_out = matrix.shape
    return replace(matrix, shape=(*experts, width_in // per_row, width_out), dtype=dtype, trains=False)


def scales(matrix: ParamSpec, form: Form) -> ParamSpec:
    """Declare the scales of a frozen ``matrix``. Each output feature has one scale, or one scale per group of
    input features. If ``form`` is asymmetric, an offset follows each scale."""
    *experts, width_in, width_out = matrix.shape
    shape = (*experts, num_scales(width_in, form), width_out)
    spec = replace(matrix, shape=shape, dtype="float16" if form.asymmetric else "float32", trains=False)
    if form.group_size is not None:
        return spec
    axis, columns = matrix.view.tensor, Shard(len(experts) + 1)
    value = {**matrix.value, axis: columns if matrix.placement(axis) == columns else REPLICATE}
    return replace(spec, value=value, parts=())


def num_scales(in_features: int, form: Form) -> int:
    """Return the number of scales per output feature of a quantized matrix. Offsets, if any, are included."""
    num_groups = in_features // form.group_size if form.group_size else 1
    return num_groups * (2 if form.asymmetric else 1)


def row_scales(table: ParamSpec, form: Form) -> ParamSpec:
    """Declare the scales of a quantized word embedding ``table``. Each row of the table has its own
    scales."""
    rows, width = table.shape
    dtype = "float16" if form.asymmetric else "float32"
    return replace(table, shape=(rows, num_scales(width, form)), dtype=dtype, trains=False)
