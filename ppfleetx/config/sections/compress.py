"""Section ``Compress``: quantisation-aware training and pruning."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from ppfleetx.config.fields import Bool, Int, PathText, RuleError, Section, Text, UnitFloat

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
    Prune: PruneConfig | None = None
    """Pruning; null: none."""

    @model_validator(mode="after")
    def _check_one(self) -> CompressConfig:
        if self.Quantization and self.Quantization.enable and self.Prune and self.Prune.enable:
            raise RuleError(("Prune.enable", "Quantization.enable"), "prune or quantise, one at a time")
        return self
