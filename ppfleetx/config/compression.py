"""Rules between ``Compress`` and other sections."""

from __future__ import annotations

from collections.abc import Iterator

from ppfleetx.config.fields import RuleError
from ppfleetx.config.sections.root import RunConfig

_SECTION = "Compress.Quantization"


def compression_violations(cfg: RunConfig) -> Iterator[RuleError]:
    """What about compression contradicts itself in ``cfg``."""
    quantization = cfg.Compress.Quantization
    try:
        if quantization is not None:
            quantization.check_layers(cfg.Model.num_layers)
    except RuleError as broken:
        yield RuleError([f"{_SECTION}.{key}" for key in broken.keys], broken.rule)
    if cfg.Compress.Distill is not None:
        yield from _distillation(cfg)


def _distillation(cfg: RunConfig) -> Iterator[RuleError]:
    key = "Compress.Distill"
    if cfg.Distributed.pp_degree > 1:
        yield RuleError(
            (key, "Distributed.pp_degree"),
            "the teacher is not divided into pipeline stages; use dp, sharding, mp or sep",
        )
    if cfg.Model.task.classifies:
        yield RuleError((key, "Model.module"), "language models are distilled, not classifiers")
    if cfg.Model.loss_chunks > 1:
        yield RuleError(
            (key, "Model.loss_chunks"), "the teacher is compared with whole logits; set loss_chunks to 1"
        )
