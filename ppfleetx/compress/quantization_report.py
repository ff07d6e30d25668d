"""The report of ``ppfleetx quantize``: how quantization changed each layer and the whole model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from ppfleetx.config.message_text import counted


@dataclass(frozen=True)
class LayerReport:
    """How quantization changed the weight of one layer.

    Attributes:
        bits: bits per element after quantization.
        before, after: size of the weight in bytes before and after quantization, including scales.
        weight_error: relative root mean square error of the weight.
        output_error: relative root mean square error of the layer's output. None if it was not measured,
            for example for an embedding table, or because there was no calibration data.
    """

    name: str
    bits: int
    before: int
    after: int
    weight_error: float
    output_error: float | None


@dataclass
class Report:
    """How quantization changed the whole model.

    Attributes:
        layers: a report for each quantized layer, in model order.
        kept: size in bytes of all parameters that were not quantized.
        perplexity_before, perplexity_after: perplexity on the evaluation data; None without such data.
        num_measured: number of tokens in the evaluation data.
        on_trained_grid: number of matrices that were rounded exactly as in quantization-aware training.
    """

    layers: list[LayerReport] = field(default_factory=list)
    kept: int = 0
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    num_measured: int = 0
    on_trained_grid: int = 0

    def set_output_errors(self, errors: Mapping[str, float]) -> None:
        """Set the output errors of the layers named in ``errors``. Other layers are unchanged."""
        self.layers = [
            replace(layer, output_error=errors.get(layer.name, layer.output_error)) for layer in self.layers
        ]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def table(self) -> str:
        rows = [("layer", "bits", "bytes before", "after", "weight error", "output error")]
        for layer in self.layers:
            output = "" if layer.output_error is None else f"{layer.output_error:.3%}"
            sizes = (f"{layer.before:,}", f"{layer.after:,}")
            rows.append((layer.name, str(layer.bits), *sizes, f"{layer.weight_error:.3%}", output))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self._summary()])

    def _summary(self) -> list[str]:
        before, after = (sum(getattr(layer, name) for layer in self.layers) for name in ("before", "after"))
        whole = (before + self.kept, after + self.kept)
        said = [
            f"weights: {whole[0]:,} -> {whole[1]:,} bytes ({whole[0] / max(whole[1], 1):.2f} times smaller), "
            f"{self.kept:,} of them kept as they were"
        ]
        if self.on_trained_grid:
            said.append(
                f"weights of {counted(self.on_trained_grid, 'linear')} lie on the grid that training with "
                "quantization rounded them to"
            )
        if self.perplexity_before is not None and self.perplexity_after is not None:
            change = self.perplexity_after / self.perplexity_before - 1
            said.append(
                f"perplexity: {self.perplexity_before:.4f} -> {self.perplexity_after:.4f} ({change:+.3%}) on "
                f"{counted(self.num_measured, 'token', ',')} that were not calibrated on"
            )
        else:
            said.append("perplexity: not measured (--calibration DATA measures it)")
        return said
