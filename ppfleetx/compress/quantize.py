"""Post-training quantization of a checkpoint. To save memory, the stages of the model, such as the
embedding or one block, are quantized one at a time."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import paddle
from paddle import nn

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.slices import DTYPE_OF_NUMPY, MODEL, NUMPY_OF_DTYPE, TensorSlice
from ppfleetx.checkpoint.state_dict import dtype_of, load_model
from ppfleetx.checkpoint.weights import in_stored_types, vocab_dims, with_vocabulary
from ppfleetx.compress.calibration_data import Samples
from ppfleetx.compress.quantization_report import LayerReport, Report
from ppfleetx.compress.rounding import (
    SMALLEST_SCALE,
    Stored,
    check_form,
    gptq,
    nearest,
    on_trained_grid,
    output_error,
    smooth_block,
    weight_error,
)
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.registries import NORMS
from ppfleetx.config.sections.compress import (
    GROUP_MULTIPLE,
    Form,
    QuantizationConfig,
    WeightsConfig,
    is_of_quantizer,
)
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.spec import parameter_shapes, parameter_specs
from ppfleetx.models.gpt.stages import model_stages
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.lora_and_quant_specs import MATRICES
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.quantized import QuantizedLinear, with_quantized_weights
from ppfleetx.nn.stage import Stage, build_stage, canonical_parameters
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.progress_bar import track

Method = Literal["rtn", "gptq"]
_SCALE_VOCAB_DIM = {"embedding.word_embeddings.scale": 0, "head.scale": 1}
GROUPS = (32, 16, 8)
"""Group sizes to try, in this order, if the user gives none. The first size that divides the number of
input features of every matrix is used. The last size is not used for 8 bits, because its scales would take
too much space."""
_ROWS = 4  # windows per batch
_MOST_ERROR = {8: 0.1, 4: 0.3}  # bits -> relative output error above which a warning is logged
_MOST_WARNINGS = 5
_OUTLIER = 20  # a feature is an outlier if it exceeds the median of all features by more than this factor


@dataclass(frozen=True)
class Options:
    """How to quantize a checkpoint.

    Attributes:
        weights: the storage format of quantized weights.
        method: ``rtn``, round to nearest, or ``gptq``, which needs calibration data.
        smooth: whether to apply SmoothQuant first, which needs calibration data.
        trained: the settings of the quantization-aware training that made the checkpoint; None if there was
            none.
    """

    weights: WeightsConfig
    method: Method = "rtn"
    smooth: bool = False
    trained: QuantizationConfig | None = None


def check_options(model: ModelConfig, options: Options) -> None:
    """Raise ConfigError if the model cannot be quantized with these options."""
    for key, is_given, remedy in (
        ("--smooth", options.smooth, "leave it out"),
        ("--method", options.method == "gptq", "round to nearest (--method rtn)"),
    ):
        if model.moe is not None and is_given:
            raise ConfigError(f"needs the inputs of each expert, which are not recorded; {remedy}", key=key)
    for key, prevents_smoothing in (
        ("latent_attention", model.latent_attention is not None),
        ("pre_norm", not model.pre_norm),
        ("shared_input_norm", model.shared_input_norm),
        ("normalization", NORMS.traits(model.normalization).zero_centered),
    ):
        if options.smooth and prevents_smoothing:
            raise ConfigError(
                f"changes the gain of the norm before a matrix, which Model.{key} does not allow",
                key="--smooth",
            )
    layers = ["head", *(name.removesuffix(".weight") for name in parameter_shapes(model))]
    for pattern in options.weights.skip:
        if not fnmatch.filter(layers, pattern):
            raise ConfigError("matches no layer of the model", key="--skip", value=pattern)
    for layer, in_features in (*_matrices(model).items(), ("embedding.word_embeddings", model.hidden_size)):
        form = options.weights.form_of(layer)
        if form is not None:
            check_form(layer, in_features, form)


def with_group(model: ModelConfig, weights: WeightsConfig) -> WeightsConfig:
    """Return a copy of ``weights`` with ``group_size`` and ``asymmetric`` chosen for the model.

    In a 4-bit matrix, the number of input features must be a multiple of GROUP_MULTIPLE. Matrices with
    another number are added to ``skip``, with a warning. Raises ConfigError if this would leave no matrix to
    quantize.
    """
    wanted = {layer: n for layer, n in _matrices(model).items() if weights.form_of(layer) is not None}
    if weights.bits == 8:
        common = math.gcd(model.hidden_size, *wanted.values())
        # Without a group size, each output feature has one scale, and there are no offsets.
        group = next((size for size in GROUPS[:-1] if common % size == 0), None)
        return weights.model_copy(update={"group_size": group, "asymmetric": group is not None})
    odd = {layer: n for layer, n in wanted.items() if n % GROUP_MULTIPLE}
    sizes = ", ".join(str(n) for n in sorted(set(odd.values())))
    if odd and len(odd) == len(wanted):
        raise ConfigError(
            f"kernels read 4-bit weights {GROUP_MULTIPLE} input features at a time, and no matrix of the "
            f"blocks has a multiple of that ({sizes}); use --to int8",
            key="--to",
            value="int4",
        )
    if odd:
        patterns = dict.fromkeys(f"*.{'.'.join(layer.split('.')[-2:])}" for layer in odd)
        get_logger().warning(
            f"{', '.join(patterns)} have {sizes} input features, and kernels read 4-bit weights "
            f"{GROUP_MULTIPLE} at a time: they stay as they are (--to int8 takes them)"
        )
        weights = weights.model_copy(update={"skip": (*weights.skip, *patterns)})
    if model.hidden_size % GROUP_MULTIPLE or not wanted:  # no group size divides hidden_size
        weights = weights.model_copy(update={"asymmetric": False})
    if not wanted:  # --skip names all of them
        return weights
    common = math.gcd(*(n for layer, n in wanted.items() if layer not in odd))
    if weights.asymmetric:
        common = math.gcd(common, model.hidden_size)
    group = next(size for size in GROUPS if common % size == 0)
    return weights.model_copy(update={"group_size": group})


def _matrices(model: ModelConfig) -> dict[str, int]:
    """Return {linear layer: number of input features} for the matrices of all blocks."""
    return {
        name.removesuffix(".weight"): spec.shape[-2]
        for name, spec in parameter_specs(model).items()
        if spec.kind == "matrix" and name.startswith("decoder.") and name.endswith(".weight")
    }


class Quantizer:
    """Quantizes the model in a checkpoint: call `run`, and then read the attribute `report`.

    Args:
        temp_dir: an empty directory for temporary files. It must exist until the result of `run` is saved.
        samples: data for calibration and evaluation; None: do neither.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ModelConfig,
        options: Options,
        temp_dir: Path,
        samples: Samples | None = None,
    ) -> None:
        self._checkpoint = with_vocabulary(checkpoint, model.vocab_size)
        self._model, self._options, self._temp_dir = model, options, temp_dir
        self._names = list(parameter_shapes(model))
        self._activations = None if samples is None else _Activations(samples, model.vocab_size)
        self._ready: dict[str, TensorSlice] = {}
        self._outliers: dict[str, str] = {}
        self.report = Report()

    @paddle.no_grad()
    def run(self) -> list[TensorSlice]:
        """Quantize the model, and return all its tensors. Their data is in the directory ``temp_dir``, so
        save them before this directory is deleted.

        Raises DataError if a weight is NaN, infinite, or too large for an asymmetric grid; CheckpointError
        if the checkpoint does not fit the model.
        """
        factory, weights = LocalFactory(), self._options.weights
        stages = model_stages(self._model, factory)
        quantized_stages = stages
        # With float activations, ordinary layers with dequantized weights are equivalent to quantized
        # layers, and faster for whole windows.
        if weights.activation_bits is not None:
            quantized_stages = with_quantized_weights(stages, weights, factory)
        shared: dict[str, nn.Layer] = {}
        quantized_shared: dict[str, nn.Layer] = {}
        both = zip(stages, quantized_stages, strict=True)
        for stage, quantized_stage in track(both, "quantizing", total=len(stages), unit="stage"):
            layer = build_stage(stage, None, shared)
            layer.eval()
            new = {n: p for n, p in canonical_parameters(layer).items() if n not in self._ready}
            load_model(
                new.items(),
                self._checkpoint,
                vocab_size=self._model.vocab_size,
                allow_extra=[name for name in self._checkpoint.names() if is_of_quantizer(name)],
                model_names=self._names,
            )
            stored = self._quantize(stage, layer, new)
            self._keep(new, stored)
            if self._activations is not None:
                quantized = build_stage(quantized_stage, None, quantized_shared)
                quantized.eval()
                self._fill(quantized, stored)
                products = _OutputErrors(layer, quantized)
                self._activations.advance(layer, quantized, is_last=stage is stages[-1])
                self.report.set_output_errors(products.errors())
            get_logger().info(f"quantized {stage.name}: {len(stored)} of {len(new)} parameters")
        self._warn()
        if self._activations is not None:
            activations = self._activations
            self.report.num_measured = activations.num_measured
            self.report.perplexity_before, self.report.perplexity_after = activations.perplexities()
        return self._in_stored_types()

    def _quantize(
        self, stage: Stage, layer: nn.Layer, parameters: Mapping[str, paddle.Tensor]
    ) -> dict[str, Stored]:
        """Quantize the matrices of a stage, and add them to the report. Returns the quantized matrices by
        parameter name."""
        forms: dict[str, Form] = {}
        for name, parameter in parameters.items():
            linear = name.removesuffix(".weight")
            if linear != name and parameter.info.kind in MATRICES:
                form = self._options.weights.form_of(linear)
                if form is not None:
                    forms[linear] = form
        one_matrix = [linear for linear in forms if parameters[f"{linear}.weight"].ndim == 2]
        seen = _Inputs(layer, [linear for linear in one_matrix if linear.startswith("decoder.")])
        if self._activations is not None and seen.linears:
            with seen:
                self._activations.pass_calibration(layer)
            if self._options.smooth:
                seen.divide(smooth_block(parameters, seen.largest))
            for linear in one_matrix:
                if linear in seen.largest:
                    rows = np.abs(parameters[f"{linear}.weight"].numpy()).max(axis=1)
                    self._outliers[linear] = _outlier(seen.largest[linear], rows)
        return {
            f"{linear}.weight": self._round(
                linear, parameters[f"{linear}.weight"], form, seen.sums.get(linear)
            )
            for linear, form in forms.items()
        }

    def _round(self, linear: str, parameter: paddle.Tensor, form: Form, hessian: np.ndarray | None) -> Stored:
        values = parameter.numpy()
        is_table = parameter.info.kind == "word_embedding"
        weight = values.T if is_table else values  # a table's rows are quantized like output features
        try:
            if hessian is not None and self._options.method == "gptq":
                stored = gptq(weight, hessian, form)
            elif weight.ndim == 3:
                of_experts = [self._rounded(linear, matrix, form) for matrix in weight]
                levels, scale = (
                    np.stack([getattr(one, of) for one in of_experts]) for of in ("levels", "scale")
                )
                stored = Stored(levels, scale, form)
            else:
                stored = self._rounded(linear, weight, form)
        except DataError as error:
            raise DataError(f"{linear}.weight of {self._checkpoint.path}: {error}") from error
        entry = self._checkpoint.entry(f"{linear}.weight")
        self.report.layers.append(
            LayerReport(
                name=linear,
                bits=form.bits,
                before=values.size * NUMPY_OF_DTYPE[entry.dtype].itemsize,
                after=stored.num_bytes,
                weight_error=weight_error(weight, stored.values()),
                output_error=None if hessian is None else output_error(weight, stored.values(), hessian),
            )
        )
        return Stored(stored.levels.T, stored.scale.T, form, is_table=True) if is_table else stored

    def _rounded(self, linear: str, weight: np.ndarray, form: Form) -> Stored:
        cfg = self._options.trained
        if cfg is not None and not self._options.smooth:  # smoothing changes the weights
            stored = on_trained_grid(weight, linear, form, cfg, self._checkpoint)
            if stored is not None:
                self.report.on_trained_grid += 1
                return stored
        return nearest(weight, form)

    def _keep(self, parameters: Mapping[str, paddle.Tensor], stored: Mapping[str, Stored]) -> None:
        for name, parameter in parameters.items():
            if name in stored:
                self._put(name, stored[name].packed())
                self._put(f"{name.removesuffix('.weight')}.scale", stored[name].scale)
            else:
                self._put(name, parameter.numpy())

    def _in_stored_types(self) -> list[TensorSlice]:
        """Return all tensors of the quantized model, and set ``report.kept``. A tensor that was not
        quantized is returned in 16 bits if the checkpoint stores it in 16 bits."""
        types = {name: self._checkpoint.entry(name).dtype for name in self._checkpoint.names()}
        tensors = [one for ready in self._ready.values() for one in in_stored_types([ready], types)]
        quantized = {f"{layer.name}.{part}" for layer in self.report.layers for part in ("weight", "scale")}
        self.report.kept = sum(tensor.num_bytes for tensor in tensors if tensor.name not in quantized)
        return tensors

    def _warn(self) -> None:
        """Log warnings about layers whose output changed too much, and about outliers that may be the
        reason."""
        weights, most = self._options.weights, _MOST_ERROR[self._options.weights.bits]
        remedies = ["a smaller --group"]
        if weights.activation_bits is not None:
            remedies = ["--to int8 without --activations and --smooth"]
            if not self._options.smooth:
                remedies.insert(0, "--smooth")
            if self._activations is None and self._options.trained is None:
                get_logger().warning(
                    "activations are rounded to 8 bits, and nothing has measured what that changes; a few "
                    "channels with large values can spoil a model. --calibration DATA measures it"
                )
        found = [layer for layer in self.report.layers if (layer.output_error or 0) > most]
        for layer in sorted(found, key=lambda layer: -layer.output_error)[:_MOST_WARNINGS]:
            get_logger().warning(
                f"{layer.name}: rounding changes its output by {layer.output_error:.0%} (normal: less than "
                f"{most:.0%}){self._outliers.get(layer.name, '')}. What may help: {', '.join(remedies)}, or "
                f"--skip '{layer.name}'"
            )
        if len(found) > _MOST_WARNINGS:
            get_logger().warning(
                f"the same is true of {len(found) - _MOST_WARNINGS} more layers (see the table)"
            )

    def _put(self, name: str, values: np.ndarray) -> None:
        path = self._temp_dir / f"{len(self._ready)}.npy"
        np.save(path, np.ascontiguousarray(values))
        self._ready[name] = TensorSlice(
            name,
            MODEL,
            DTYPE_OF_NUMPY[values.dtype],
            values.shape,
            (0,) * values.ndim,
            values.shape,
            lambda: np.load(path, mmap_mode="r"),
            vocab_dim=_SCALE_VOCAB_DIM.get(name, vocab_dims().get(name)),
        )

    def _fill(self, layer: nn.Layer, stored: Mapping[str, Stored]) -> None:
        """Load the weights into a stage of the quantized model. A quantized matrix is loaded as integers
        and scales if its layer can hold them, and otherwise as dequantized float32 weights.

        Args:
            layer: the stage.
            stored: the quantized matrices, by parameter name.
        """
        for name, parameter in canonical_parameters(layer).items():
            if name in stored and parameter.dtype == paddle.float32:
                parameter.set_value(stored[name].values())
            elif dtype_of(parameter) == self._ready[name].dtype:
                # The types differ for a tied embedding, which an earlier stage has loaded.
                parameter.set_value(np.array(self._ready[name].array()))


def _outlier(inputs: np.ndarray, rows: np.ndarray) -> str:
    """Describe the most extreme input feature of a layer, for a warning. Returns an empty string if no
    feature is an outlier.

    Args:
        inputs: the largest magnitude ``[k]`` of each input feature.
        rows: the largest magnitude ``[k]`` of the weights that multiply each input feature.
    """
    said = {}
    for what, largest in (("its input", inputs), ("the weights of its input", rows)):
        feature, median = int(largest.argmax()), float(np.median(largest))
        ratio = float(largest[feature]) / max(median, SMALLEST_SCALE)
        said[ratio] = f"; {what} {feature} reaches {ratio:,.0f} times the median of all"
    ratio = max(said)
    return said[ratio] if ratio > _OUTLIER else ""


class _OutputErrors:
    """Measures the output errors of the quantized linear layers in a stage. Only layers that also round
    activations are measured. Every forward pass of ``quantized`` adds to the measurement.

    Args:
        layer: the unquantized stage.
        quantized: the quantized copy of the stage.
    """

    def __init__(self, layer: nn.Layer, quantized: nn.Layer) -> None:
        weights = canonical_parameters(layer)
        self._squares: dict[str, np.ndarray] = {}
        for linear in quantized.sublayers(include_self=True):
            if isinstance(linear, QuantizedLinear) and linear.matrix.rounds_activations:
                name = linear.weight.info.name
                linear.register_forward_post_hook(partial(self._add, name=name, exact=weights[name]))

    def _add(
        self, linear: QuantizedLinear, x: tuple, y: paddle.Tensor, *, name: str, exact: paddle.Tensor
    ) -> None:
        product = paddle.matmul(x[0], exact)
        got = y if linear.bias is None else y - linear.bias
        squares = [float((one.astype("float64") ** 2).sum()) for one in (got - product, product)]
        self._squares[name] = self._squares.get(name, np.zeros(2)) + squares

    def errors(self) -> dict[str, float]:
        """Return {linear layer: relative output error}. The relative error is the root mean square of the
        error divided by the root mean square of the output."""
        return {
            name.removesuffix(".weight"): math.sqrt(change / size) if size else 0.0
            for name, (change, size) in self._squares.items()
        }


@dataclass
class _Inputs:
    """Context manager that records statistics of the inputs of linear layers during forward passes.

    Attributes:
        layer: the stage that contains the linear layers.
        linears: the names of the linear layers.
        sums: name -> ``X^T X [k, k]``, float64, where X ``[tokens, k]`` are all inputs of the linear layer.
        largest: name -> the largest magnitude ``[k]`` of each input feature.
    """

    layer: nn.Layer
    linears: list[str]
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    largest: dict[str, np.ndarray] = field(default_factory=dict)
    _hooks: list = field(default_factory=list)

    def __enter__(self) -> _Inputs:
        for sublayer in self.layer.sublayers(include_self=True):
            info = getattr(getattr(sublayer, "weight", None), "info", None)
            linear = info.name.removesuffix(".weight") if info is not None else None
            if linear in self.linears:
                self._hooks.append(
                    sublayer.register_forward_pre_hook(lambda _, x, name=linear: self._add(name, x[0]))
                )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, linear: str, x: paddle.Tensor) -> None:
        rows = x.reshape([-1, x.shape[-1]])
        product = paddle.matmul(rows, rows, transpose_x=True).numpy().astype(np.float64)
        largest = rows.abs().max(axis=0).numpy()
        if linear in self.sums:
            self.sums[linear] += product
            self.largest[linear] = np.maximum(self.largest[linear], largest)
        else:
            self.sums[linear], self.largest[linear] = product, largest

    def divide(self, factors: Mapping[str, np.ndarray]) -> None:
        """Update the statistics after SmoothQuant, which divides the inputs of linear layers.

        Args:
            factors: name of the linear layer -> the divisors ``[k]`` of its input features.
        """
        for linear, factor in factors.items():
            self.sums[linear] /= np.outer(factor, factor)
            self.largest[linear] /= factor


class _Activations:
    """Passes windows of tokens through the original and the quantized model, stage by stage."""

    def __init__(self, samples: Samples, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._labels = [rows[:, 1:] for rows in _batches(samples.evaluation)]
        self.num_measured = samples.evaluation[:, 1:].size
        self._calibration = [_first_state(rows) for rows in _batches(samples.calibration)]
        self._before = [_first_state(rows) for rows in _batches(samples.evaluation)]
        self._after = list(self._before)

    def pass_calibration(self, layer: nn.Layer) -> None:
        """Run the unquantized stage ``layer`` on the calibration data, so that hooks can record the inputs
        of its linear layers. The inputs of the stage come from the quantized previous stage."""
        for state in self._calibration:
            layer(state)

    def advance(self, layer: nn.Layer, quantized: nn.Layer, *, is_last: bool) -> None:
        """Pass the calibration data through the stage ``quantized``, and the evaluation data through
        ``layer`` and ``quantized`` separately.

        Args:
            layer: the unquantized stage.
            quantized: the quantized stage.
            is_last: whether this is the last stage. If so, only the evaluation data is passed.
        """
        for states, through in (
            (self._before, layer),
            (self._after, quantized),
            (self._calibration, quantized),
        ):
            if is_last and states is self._calibration:
                continue
            for number, state in enumerate(states):
                states[number] = through(state)
                if not isinstance(states[number], tuple):  # logits, which are large
                    states[number] = self._loss(states, number)

    def _loss(self, states: list, number: int) -> float:
        labels = paddle.to_tensor(self._labels[number])
        return token_loss(states[number], labels, paddle.ones(labels.shape), self._vocab_size).loss.item()

    def perplexities(self) -> tuple[float, float]:
        """Return the perplexities of the original and the quantized model. Call this after the last stage."""
        return tuple(
            math.exp(min(sum(states) / self.num_measured, 700)) for states in (self._before, self._after)
        )


def _batches(windows: np.ndarray) -> Iterator[np.ndarray]:
    return (windows[start : start + _ROWS] for start in range(0, len(windows), _ROWS))


def _first_state(rows: np.ndarray) -> tuple[paddle.Tensor, ...]:
    tokens = paddle.to_tensor(rows[:, :-1])
    return tokens, paddle.arange(tokens.shape[1]).unsqueeze(0).expand_as(tokens)
