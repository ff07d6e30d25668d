"""Configuration section ``Compress``: quantization, pruning and distillation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field

from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import (
    Bool,
    CountInt,
    Fraction,
    Int,
    NonNegativeFloat,
    PathText,
    PositiveFloat,
    PositiveInt,
    Size,
    Text,
    UnitFloat,
)
from ppfleetx.config.section import Section
from ppfleetx.config.sections.lora import BLOCK_LINEARS, unmatched

GROUP_MULTIPLE = 8
"""The number of input features that kernels read together. Group sizes are multiples of this number."""
QUANTIZER = "quant"
"""The name of the quantizer's sub-layer in a linear; part of the canonical names of its parameters."""
LINEAR_KINDS = ("Linear", "ColumnParallelLinear", "RowParallelLinear")
_FREQUENCY = 100  # default number of steps between removals
_CONVOLUTIONS = ("Conv2D", "Conv2DTranspose")  # accepted because FleetX's files list them
_MLP_LINEARS = {"linear1": "fc1", "linear2": "fc2"}
_BLOCK = re.compile(r"block_\d{1,5}", re.ASCII)


def is_of_quantizer(name: str) -> bool:
    """Whether the parameter ``name`` is a scale or clipping bound of a linear layer's quantizer, not a
    weight."""
    return f".{QUANTIZER}." in name


class QuantizationConfig(Section):
    """Quantization-aware training of the linear layers in the transformer blocks.

    The forward pass rounds their weights and inputs to `2^bits - 1` levels. The backward pass ignores the
    rounding (straight-through estimator).
    """

    enable: Bool = False
    """Train with simulated quantization."""
    weight_quantize_type: Literal["abs_max", "channel_wise_abs_max"] = "abs_max"
    """One scale for each weight matrix (abs_max), or one for each output channel (channel_wise_abs_max)."""
    activation_quantize_type: Literal["moving_average_abs_max", "abs_max"] = "moving_average_abs_max"
    """Scale of a linear's input. moving_average_abs_max: one number, which follows the largest magnitude of
    each step's global batch and is stored with the weights; the first step is not rounded. abs_max: each
    token's own largest magnitude; nothing is stored."""
    moving_rate: Fraction = 0.9
    """The share of the moving average that each step keeps."""
    weight_preprocess_type: Literal["PACT"] | None = None
    """Clip weights at a learned bound before quantizing; null: do not clip. The bound is the scale times a
    learned factor, which starts at 1."""
    activation_preprocess_type: Literal["PACT"] | None = None
    """Clip activations in the same way; null: do not clip."""
    weight_bits: Int = 8
    """Bits of weights."""
    activation_bits: Int = 8
    """Bits of activations."""
    quantizable_layer_type: tuple[Text, ...] = LINEAR_KINDS
    """Kinds of layers to quantize, under any plan. Linear: all linears. ColumnParallelLinear: linears whose
    outputs tensor parallelism divides (`attention.qkv`, `mlp.fc1`). RowParallelLinear: linears whose inputs
    it divides (`attention.out_proj`, `mlp.fc2`). Convolutions may be listed, but a GPT has none."""
    skip_tensor_map: dict[str, tuple[Literal["linear1", "linear2"], ...]] = Field(default_factory=dict)
    """Linears that are not quantized: `block_3: [linear2]` is the second linear of layer 3's MLP."""
    skip_layers: tuple[Text, ...] = ()
    """Patterns (`*`, `?`, `[...]`) for the canonical names of linears that are not quantized, e.g.
    `decoder.layers.0.*` or `*.mlp.fc2`. Each must match at least one linear of the blocks."""
    freeze_embedding: Bool = False
    """Do not train the embeddings."""

    def quantizes(self, name: str, kind: str) -> bool:
        """Whether layer ``name`` is quantized in training; ``kind`` is one of :data:`LINEAR_KINDS`."""
        if not self.enable or not name.endswith(BLOCK_LINEARS):
            return False
        if name.endswith("attention.kv_up"):  # decoding multiplies queries, not the input, by this weight
            return False
        if not {"Linear", kind} & set(self.quantizable_layer_type):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self._skipped())

    def _skipped(self) -> Iterator[str]:
        yield from self.skip_layers
        for block, linears in self.skip_tensor_map.items():
            for linear in linears:
                yield f"*.layers.{int(block.removeprefix('block_'))}.mlp.{_MLP_LINEARS[linear]}"

    def unknown_layers(self, num_layers: int, names: Sequence[str]) -> Iterator[RuleError]:
        """Yield an error for each entry of ``skip_tensor_map`` or ``skip_layers`` that matches no layer of
        the model. The model has ``num_layers`` blocks, and ``names`` lists its linear layers."""
        for block in self.skip_tensor_map:
            if int(block.removeprefix("block_")) >= num_layers:
                yield RuleError(
                    (f"skip_tensor_map.{block}",),
                    f"the model has the layers block_0 to block_{num_layers - 1} (Model.num_layers)",
                )
        yield from unmatched("skip_layers", self.skip_layers, names)

    def violations(self) -> Iterator[RuleError]:
        for key in ("weight_bits", "activation_bits"):
            if not 2 <= getattr(self, key) <= 16:
                yield RuleError((key,), "must be between 2 and 16")
        for name in self.skip_tensor_map:
            if not _BLOCK.fullmatch(name):
                yield RuleError(
                    (f"skip_tensor_map.{name}",), "names are block_0, block_1 and so on, one for each layer"
                )
        for kind in self.quantizable_layer_type:
            if kind not in (*LINEAR_KINDS, *_CONVOLUTIONS):
                near = get_close_matches(kind, LINEAR_KINDS, n=1, cutoff=0.0)[0]
                yield RuleError(
                    ("quantizable_layer_type",),
                    f"there is no layer type {kind!r} to quantize; did you mean {near}? There are "
                    f"{', '.join(LINEAR_KINDS)}",
                )
        if self.enable and not set(self.quantizable_layer_type) & set(LINEAR_KINDS):
            yield RuleError(("quantizable_layer_type",), f"names none of {', '.join(LINEAR_KINDS)}")


@dataclass(frozen=True)
class Form:
    """The storage format of a quantized weight matrix.

    Attributes:
        bits: bits per element, 8 or 4.
        group_size: the number of input features that share a scale; None: all.
        activation_bits: 8 if the layer's inputs are rounded; None if they are not.
        asymmetric: whether each group has an offset besides its scale.
    """

    bits: int
    group_size: int | None = None
    activation_bits: int | None = None
    asymmetric: bool = False


class WeightsConfig(Section):
    """How a quantized checkpoint stores its weights. `ppfleetx quantize` writes this section; do not edit it.

    The linear layers of the blocks have `bits` bits; the word embedding and the head have 8 bits. With
    `asymmetric`, `group_size` applies to all of them. Otherwise it applies only to the linear layers of the
    blocks, and each row of the embedding and each output of the head has one scale.
    """

    bits: Literal[8, 4] = 8
    """Bits of a weight in the blocks."""
    group_size: Size | None = None
    """Number of input features that share a scale; null: all."""
    activation_bits: Literal[8] | None = None
    """8: round the inputs of the blocks' linears to 8 bits, too; null: do not. With groups, each group of an
    input has a separate scale, and the head's input is rounded as well."""
    asymmetric: Bool = False
    """Weights are `scale * q + offset`, with a 16-bit scale and offset for each group, also in the word
    embedding and the head. False: weights are `scale * q`, with 32-bit scales."""
    skip: tuple[Text, ...] = ()
    """Patterns (`*`, `?`, `[...]`) for the names of layers that are not quantized, e.g. `head` or
    `*.mlp.fc2`."""

    def form_of(self, name: str) -> Form | None:
        """The storage format of the weight of layer ``name``; None if it is not quantized."""
        if any(fnmatchcase(name, pattern) for pattern in self.skip):
            return None
        if not name.startswith("decoder."):
            if self.asymmetric:
                return Form(8, self.group_size, self.activation_bits, asymmetric=True)
            return Form(8, activation_bits=None if self.group_size is None else self.activation_bits)
        return Form(self.bits, self.group_size, self.activation_bits, self.asymmetric)

    def violations(self) -> Iterator[RuleError]:
        if self.group_size is not None and self.group_size % GROUP_MULTIPLE:
            yield RuleError(("group_size",), f"must be a multiple of {GROUP_MULTIPLE}")


class PruneConfig(Section):
    """Structured pruning in training: heads and feed-forward units with the smallest weights are kept zero.

    The same number of heads and units is pruned in each layer. A key/value head is pruned together with its
    query heads. `ppfleetx prune` removes them from the checkpoint afterwards.

    If `end_step` is null, the share `ratio` is pruned after `begin_step` steps. Otherwise, the share pruned
    after t steps is `ratio * (1 - (1 - (t - begin_step) / (end_step - begin_step))^3)` (Zhu and Gupta, 2017).
    """

    enable: Bool = False
    """Prune during training."""
    criterion: Literal["l1_norm", "l2_norm"] = "l1_norm"
    """The size of a head or unit: the sum of its weights' magnitudes, or of their squares. The smallest are
    removed."""
    ratio: UnitFloat = 0.125
    """Share of heads or units to remove in the end; their number is rounded down, as with `ppfleetx prune
    --ratio`."""
    part: Literal["heads", "mlp", "both"] = "both"
    """Prune attention heads, feed-forward units, or both."""
    begin_step: CountInt = 0
    """Steps before pruning begins."""
    end_step: CountInt | None = None
    """Steps after which the whole ratio is removed; null: `begin_step`, all at once."""
    frequency: PositiveInt = _FREQUENCY
    """Steps between removals."""

    @property
    def last_step(self) -> int:
        """The number of optimizer steps after which pruning is complete: the fraction ``ratio`` is
        removed."""
        return self.begin_step if self.end_step is None else self.end_step

    def is_due(self, step: int) -> bool:
        """Whether the schedule removes heads or units after ``step`` optimizer steps."""
        if step == self.last_step:
            return True
        return self.begin_step <= step < self.last_step and (step - self.begin_step) % self.frequency == 0

    def share_after(self, step: int) -> float:
        """The share of heads or units removed after ``step`` optimizer steps, from 0 to ``ratio``."""
        if step >= self.last_step:
            return self.ratio
        if step < self.begin_step:
            return 0.0
        done = (step - self.begin_step) // self.frequency * self.frequency
        left = 1 - done / (self.last_step - self.begin_step)
        return self.ratio * (1 - left**3)

    def violations(self) -> Iterator[RuleError]:
        if self.enable and self.ratio == 1:
            yield RuleError(("ratio",), "of 1 leaves nothing; it is the share removed")
        if self.last_step < self.begin_step:
            yield RuleError(("end_step", "begin_step"), "pruning ends before it begins")
        if self.enable and self.end_step is None and self.frequency != _FREQUENCY:
            yield RuleError(("frequency",), "goes with end_step; without it all are removed at once")


def num_to_remove(total: int, share: float) -> int:
    """Return the number of heads, units or experts to remove from ``total``, rounded down.

    ``share`` is the fraction to remove, from 0 to 1.
    """
    return int(total * share + 1e-9)


class DistillConfig(Section):
    """Distillation: the model (the student) also learns from the outputs of a teacher (Hinton et al., 2015).

    The loss of a token is `hard_weight * cross_entropy + soft_weight * temperature^2 * divergence`. The
    divergence is KL(p || q), where p and q are the distributions of teacher and student at `temperature`.
    """

    teacher: PathText
    """Checkpoint of the teacher. The teacher can have any plan and size, but must have the same tokenizer."""
    temperature: PositiveFloat = 2.0
    """Divides the logits of teacher and student; a higher value gives unlikely tokens more weight."""
    hard_weight: NonNegativeFloat = 0.5
    """Weight of the cross entropy."""
    soft_weight: NonNegativeFloat = 0.5
    """Weight of the divergence."""

    def violations(self) -> Iterator[RuleError]:
        if self.soft_weight == 0:
            yield RuleError(("soft_weight",), "of 0 learns nothing of the teacher; leave out the section")


class CompressConfig(Section):
    """Quantization, pruning and distillation, which make a model smaller."""

    Quantization: QuantizationConfig | None = None
    """Quantization-aware training; null: none."""
    Weights: WeightsConfig | None = None
    """How the weights of a quantized checkpoint are stored; null: they are not quantized."""
    Prune: PruneConfig | None = None
    """Pruning during training; null: none."""
    Distill: DistillConfig | None = None
    """Distillation; null: none."""

    @property
    def quantization(self) -> QuantizationConfig | None:
        return self.Quantization if self.Quantization is not None and self.Quantization.enable else None

    @property
    def pruning(self) -> PruneConfig | None:
        return self.Prune if self.Prune is not None and self.Prune.enable else None

    def violations(self) -> Iterator[RuleError]:
        if self.quantization is not None and self.pruning is not None:
            yield RuleError(("Prune.enable", "Quantization.enable"), "prune or quantize, one at a time")
        if self.quantization is not None and self.Weights is not None:
            yield RuleError(
                ("Quantization.enable", "Weights"),
                "weights that are stored quantized are not trained; train from the checkpoint they were made "
                "of",
            )
