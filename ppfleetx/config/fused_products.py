"""Which fused products with weights a run makes use of; a list of operators may not name the others."""

from __future__ import annotations

from collections.abc import Iterator

from ppfleetx.config.fields import RuleError
from ppfleetx.config.sections.model import FusedName
from ppfleetx.config.sections.root import RunConfig

_MIXED = "Engine.mix_precision."

Reason = tuple[tuple[str, ...], str]
"""Keys that decide, and why in words."""


def without_place(cfg: RunConfig) -> dict[FusedName, Reason]:
    """Fused products with weights that a run in 16 bits makes no use of, whatever the device."""
    mixed = cfg.Engine.mix_precision
    if not mixed.enable:
        return {}
    names: tuple[FusedName, ...] = ("linear_grad_add", "weight_cast")
    if cfg.Compress.quantization is not None:
        why = "layers multiply by weights that are rounded for each product"
        return dict.fromkeys(names, (("Compress.Quantization.enable",), why))
    found: dict[FusedName, Reason] = {}
    if mixed.level == "O1":
        found["linear_grad_add"] = (
            (_MIXED + "level",),
            "at O1 weights are float32, and so are their gradients",
        )
    elif not mixed.main_grad_fp32:
        found["linear_grad_add"] = (_MIXED + "main_grad_fp32",), "gradients are to be added in 16 bits"
    sharding = cfg.Distributed.sharding
    if mixed.level == "O2":
        found["weight_cast"] = (_MIXED + "level",), "at O2 weights are held in 16 bits"
    elif {"matmul", "linear_v2"} & set(mixed.custom_black_list):
        found["weight_cast"] = (_MIXED + "custom_black_list",), "products are to be computed in float32"
    elif sharding.sharding_degree > 1 and sharding.sharding_stage == 3:
        key = "Distributed.sharding.sharding_stage"
        found["weight_cast"] = (key,), "stage 3 drops values after each use, and copies of them would stay"
    return found


def fused_violations(cfg: RunConfig) -> Iterator[RuleError]:
    """Operators that are listed and that the run would make no use of."""
    listed = () if isinstance(cfg.Model.fused_ops, str) else cfg.Model.fused_ops
    for name, (keys, why) in without_place(cfg).items():
        if name in listed:
            yield RuleError(
                ("Model.fused_ops", *keys), f"{name} would not be used: {why}; leave it out of the list"
            )
