"""Rules between ``Compress`` and other sections."""

from __future__ import annotations

from collections.abc import Iterator

from ppfleetx.config.fields import RuleError
from ppfleetx.config.sections.root import RunConfig

_SECTION = "Compress.Quantization"


def compression_violations(cfg: RunConfig) -> Iterator[RuleError]:
    """What about compression contradicts itself in ``cfg``."""
    quantization = cfg.Compress.Quantization
    if quantization is None:
        return
    try:
        quantization.check_layers(cfg.Model.num_layers)
    except RuleError as broken:
        yield RuleError([f"{_SECTION}.{key}" for key in broken.keys], broken.rule)
