"""Rules between ``Compress`` and other sections."""

from __future__ import annotations

from collections.abc import Iterator

from ppfleetx.config.fields import RuleError
from ppfleetx.config.sections.compress import PruneConfig, parts_out
from ppfleetx.config.sections.root import RunConfig

_SECTION = "Compress.Quantization"


def compression_violations(cfg: RunConfig) -> Iterator[RuleError]:
    """What about compression contradicts itself in ``cfg``."""
    quantization = cfg.Compress.Quantization
    try:
        if quantization is not None:
            quantization.check_layers(cfg.Model.num_layers, cfg.Model.block_linears())
    except RuleError as broken:
        yield RuleError([f"{_SECTION}.{key}" for key in broken.keys], broken.rule)
    if cfg.Compress.pruning is not None:
        yield from _pruning(cfg, cfg.Compress.pruning)
    if cfg.Model.moe is not None and cfg.Compress.quantization is not None:
        yield RuleError((f"{_SECTION}.enable", "Model.moe"), "experts are not trained with quantisation")
    if cfg.Model.moe is not None and cfg.Compress.Weights is not None:
        yield RuleError(("Compress.Weights", "Model.moe"), "experts are not stored in few bits")
    if cfg.Compress.Distill is not None:
        yield from _distillation(cfg)


def _pruning(cfg: RunConfig, pruning: PruneConfig) -> Iterator[RuleError]:
    key, model = "Compress.Prune", cfg.Model
    if model.lora is not None:
        yield RuleError(
            (f"{key}.enable", "Model.lora"),
            "the weights below adapters are not trained, so they are not pruned while training; prune the "
            "checkpoint first (ppfleetx prune), or merge the adapters (ppfleetx merge)",
        )
    if model.moe is not None and pruning.part != "heads":
        yield RuleError((f"{key}.part", "Model.moe"), "units of experts are not pruned; set part to heads")
    totals = {"heads": model.kv_heads, "mlp": model.ffn_size}
    pruned = [part for part in totals if pruning.part in (part, "both")]
    if "heads" in pruned and model.kv_heads == 1:
        yield RuleError(
            (f"{key}.part", "Model.num_query_groups"),
            "each layer has one key/value head only, which stays; set part to mlp",
        )
    elif not any(parts_out(totals[part], pruning.ratio) for part in pruned):
        what = {"heads": f"{model.kv_heads} key/value heads", "mlp": f"{model.ffn_size} feed-forward units"}
        yield RuleError((f"{key}.ratio",), f"removes none of {' and '.join(what[part] for part in pruned)}")
    if pruning.last_step >= cfg.Engine.max_steps:
        last = "begin_step" if pruning.end_step is None else "end_step"
        yield RuleError((f"{key}.{last}", "Engine.max_steps"), "training ends before everything is removed")


def _distillation(cfg: RunConfig) -> Iterator[RuleError]:
    key = "Compress.Distill"
    if cfg.Model.task.classifies:
        yield RuleError((key, "Model.module"), "language models are distilled, not classifiers")
    if cfg.Model.loss_chunks > 1:
        yield RuleError(
            (key, "Model.loss_chunks"), "the teacher is compared with whole logits; set loss_chunks to 1"
        )
