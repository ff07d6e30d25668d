"""Section ``Compress``: quantisation-aware training and pruning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field, model_validator

from ppfleetx.config.fields import Bool, Int, PathText, RuleError, Section, Size, Text, UnitFloat

GROUP_MULTIPLE = 8
"""Input features that kernels read together."""
_BLOCK = re.compile(r"block_\d{1,5}", re.ASCII)


class QuantizationConfig(Section):
    """Quantisation-aware training."""

    enable: Bool = False
    """Train with simulated quantisation."""
    weight_quantize_type: Literal["abs_max", "channel_wise_abs_max"] = "abs_max"
    """One scale per weight, or one per output channel."""
    activation_quantize_type: Literal["moving_average_abs_max", "abs_max"] = "moving_average_abs_max"
    """Scale of activations: a moving average, or each batch's own."""
    weight_preprocess_type: Literal["PACT"] | None = None
    """Clip weights by a learned bound before quantising."""
    activation_preprocess_type: Literal["PACT"] | None = None
    """Clip activations by a learned bound before quantising."""
    weight_bits: Int = 8
    """Bits of weights."""
    activation_bits: Int = 8
    """Bits of activations."""
    quantizable_layer_type: tuple[Text, ...] = ("Linear", "ColumnParallelLinear", "RowParallelLinear")
    """Kinds of layers that are quantised."""
    skip_tensor_map: dict[str, tuple[Literal["linear1", "linear2"], ...]] = Field(default_factory=dict)
    """Linears that stay unquantised: `block_3: [linear2]` is the second one of layer 3's MLP."""
    freeze_embedding: Bool = False
    """Do not train the embeddings."""

    @model_validator(mode="after")
    def _check_bits(self) -> QuantizationConfig:
        for key in ("weight_bits", "activation_bits"):
            if not 2 <= getattr(self, key) <= 16:
                raise RuleError((key,), "must be between 2 and 16")
        for name in self.skip_tensor_map:
            if not _BLOCK.fullmatch(name):
                raise RuleError(
                    (f"skip_tensor_map.{name}",), "names are block_0, block_1 and so on, one for each layer"
                )
        return self


@dataclass(frozen=True)
class Form:
    """How a matrix is stored and multiplied with.

    Attributes:
        bits: of its elements, 8 or 4.
        group_size: input features with one scale; None: all.
        activation_bits: 8: rows it is multiplied with are rounded to 8 bits first; None: they are not.
    """

    bits: int
    group_size: int | None = None
    activation_bits: int | None = None


class WeightsConfig(Section):
    """How the weights of a quantised checkpoint are stored. `ppfleetx quantize` writes this section; it is
    not a wish, and is not written by hand.

    Linears of the blocks have `bits`; the word embedding and the head have 8, with a scale for each row or
    column."""

    bits: Literal[8, 4] = 8
    """Bits of a weight in the blocks."""
    group_size: Size | None = None
    """Input features that share a scale; null: all of an output feature's."""
    activation_bits: Literal[8] | None = None
    """8: what weights of the blocks are multiplied with is rounded to 8 bits as well; null: it is not."""
    skip: tuple[Text, ...] = ()
    """Patterns (`*`, `?`, `[...]`) of the layers that are stored as they were, e.g. `head` or `*.mlp.fc2`."""

    def form_of(self, name: str) -> Form | None:
        """How the layer of this canonical name is stored; None: as it was."""
        if any(fnmatchcase(name, pattern) for pattern in self.skip):
            return None
        if not name.startswith("decoder."):
            return Form(8)
        return Form(self.bits, self.group_size, self.activation_bits)

    @model_validator(mode="after")
    def _check(self) -> WeightsConfig:
        if self.bits == 4 and self.activation_bits is not None:
            raise RuleError(
                ("activation_bits", "bits"),
                "activations of 8 bits go with weights of 8 bits only",
            )
        if self.activation_bits is not None and self.group_size is not None:
            raise RuleError(
                ("activation_bits", "group_size"),
                "activations of 8 bits go without groups: a column has one scale",
            )
        if self.group_size is not None and self.group_size % GROUP_MULTIPLE:
            raise RuleError(("group_size",), f"must be a multiple of {GROUP_MULTIPLE}")
        return self


class PruneConfig(Section):
    """Structured pruning of attention heads and MLP columns."""

    enable: Bool = False
    """Prune before training."""
    criterion: Literal["l1_norm", "l2_norm"] = "l1_norm"
    """What is small is removed: by sum of magnitudes or of squares."""
    ratio: UnitFloat = 0.125
    """Share removed."""


class CompressConfig(Section):
    """Smaller models."""

    pretrained: PathText | None = None
    """Checkpoint whose weights are compressed."""
    Quantization: QuantizationConfig | None = None
    """Quantisation-aware training; null: none."""
    Weights: WeightsConfig | None = None
    """How the weights of a quantised checkpoint are stored; null: they are not quantised."""
    Prune: PruneConfig | None = None
    """Pruning; null: none."""

    @model_validator(mode="after")
    def _check_one(self) -> CompressConfig:
        if self.Quantization and self.Quantization.enable and self.Prune and self.Prune.enable:
            raise RuleError(("Prune.enable", "Quantization.enable"), "prune or quantise, one at a time")
        return self
