"""Implement ``ppfleetx prune``, which makes a smaller model from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.checkpoint.model_only import save_weights
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.weights import lazy, slices_of, with_vocabulary
from ppfleetx.commands.checkpoint_verbs import (
    Prune,
    calibration_samples,
    open_model,
    refuse_quantized_or_adapted,
)
from ppfleetx.commands.initialize import start_with
from ppfleetx.compress.prune import (
    experts_left,
    kept_experts,
    kept_of,
    magnitude_scores,
    pruned_mixtures,
    pruned_model,
    pruned_tensors,
    router_scores,
    sizes_after,
    without_experts,
)
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.models.gpt.spec import flops_per_step, parameter_count
from ppfleetx.utils.log import configure_logging, get_logger

REPORT_FILE = "pruning.json"


@dataclass(frozen=True)
class _Pruned:
    """A pruned model.

    Attributes:
        tensors: the remaining parameters, by their names in checkpoints.
        layers: for each layer, which parts were kept or removed.
        sizes: rows of the printed table: (name, size before, size after).
    """

    model: ModelConfig
    tensors: Mapping[str, LazyTensor]
    layers: list[dict[str, Any]]
    sizes: list[tuple[str, int, int]]


def prune(options: Prune) -> Path:
    """Remove attention heads, feed-forward units, experts or layers from a model, as the options say. Writes
    the smaller model as a checkpoint, with a report that lists the parts kept in each layer. Returns the
    checkpoint's directory.
    """
    configure_logging()
    _check(options)
    with open_model(options) as (cfg, directory, tokenizer):
        refuse_quantized_or_adapted(cfg, options.checkpoint)
        take_out = _without_experts if options.part == "experts" else _without_parts
        pruned, checkpoint = take_out(cfg, directory, options, tokenizer)
        return _write(cfg, checkpoint, options, pruned, tokenizer)


def _check(options: Prune) -> None:
    options.check()
    is_of_experts = options.part == "experts"
    measured, other = ("usage", "saliency") if is_of_experts else ("saliency", "usage")
    if options.criterion == other:
        raise ConfigError(
            f"does not measure {'experts' if is_of_experts else 'heads and units'}; for them there are "
            f"{measured}, l1_norm and l2_norm",
            key="--criterion",
            value=other,
        )
    if is_of_experts and options.drop_layers:
        raise ConfigError(
            "does not go with --part experts; remove layers and experts one after the other",
            key="--drop-layers",
            value=list(options.drop_layers),
        )
    if options.criterion == measured and options.calibration is None:
        what = "which experts the tokens use" if is_of_experts else "what the loss would lose"
        raise ConfigError(f"looks at {what}: give --calibration DATA", key="--criterion", value=measured)
    if options.criterion != measured and options.calibration is not None:
        raise ConfigError(f"is read with --criterion {measured} only", key="--calibration")


def _without_parts(
    cfg: RunConfig, directory: Path, options: Prune, tokenizer: Tokenizer | None
) -> tuple[_Pruned, Checkpoint]:
    model = cfg.Model
    sizes = sizes_after(
        model,
        options.ratio,
        part=options.part,
        multiple=options.multiple,
        drop_layers=options.drop_layers,
    )
    checkpoint = open_resolved(resolve_checkpoint(directory, verify=True))
    tensors = _tensors(checkpoint, cfg)
    samples = calibration_samples(cfg, options, tokenizer, min_tokens=1)
    if samples is None:
        scores = {i: magnitude_scores(tensors, model, i, options.criterion) for i in sizes.layers}
    else:
        start_with(cfg)
        from ppfleetx.compress.saliency import saliency_scores

        scores = saliency_scores(checkpoint, model, samples.calibration)
    kept = {layer: kept_of(scores[layer], sizes) for layer in sizes.layers}
    small = pruned_model(model, sizes)
    layers = [
        {"was": layer, "groups": kept[layer].groups.tolist(), "units": kept[layer].units.tolist()}
        for layer in sizes.layers
    ]
    rows = [
        ("layers", model.num_layers, small.num_layers),
        ("attention heads", model.num_attention_heads, small.num_attention_heads),
        ("key/value heads", model.kv_heads, small.kv_heads),
        ("feed-forward units", model.ffn_size, small.ffn_size),
    ]
    return _Pruned(small, dict(pruned_tensors(tensors, model, sizes, kept)), layers, rows), checkpoint


def _without_experts(
    cfg: RunConfig, directory: Path, options: Prune, tokenizer: Tokenizer | None
) -> tuple[_Pruned, Checkpoint]:
    model = cfg.Model
    left = experts_left(model, options.ratio, multiple=options.multiple)
    checkpoint = open_resolved(resolve_checkpoint(directory, verify=True))
    tensors = _tensors(checkpoint, cfg)
    samples = calibration_samples(cfg, options, tokenizer, min_tokens=1)
    if samples is None:
        measure, scores = (
            f"{options.criterion} of the router",
            router_scores(tensors, model, options.criterion),
        )
    else:
        start_with(cfg)
        from ppfleetx.compress.saliency import usage_scores

        measure, scores = "routed weight", usage_scores(checkpoint, model, samples.calibration)
    kept = {layer: kept_experts(each, left, model.moe.router.num_groups) for layer, each in scores.items()}
    small = pruned_mixtures(model, left)
    layers = []
    for layer, each in scores.items():
        shares, stayed = (each / each.sum()).tolist(), kept[layer].tolist()
        gone = [expert for expert in range(len(shares)) if expert not in stayed]
        layers.append({"layer": layer, "removed": gone, "kept": stayed, "shares": shares, "of": measure})
        named = ", ".join(f"{expert} ({shares[expert]:.2%})" for expert in gone)
        print(f"layer {layer}: removed experts and their shares of the {measure}: {named}", flush=True)
    rows = [("experts of a layer", model.moe.num_experts, left)]
    return _Pruned(small, dict(without_experts(tensors, model, small, kept)), layers, rows), checkpoint


def _tensors(checkpoint: Checkpoint, cfg: RunConfig) -> dict[str, LazyTensor]:
    source = with_vocabulary(checkpoint, cfg.Model.vocab_size)
    return {name: lazy(source, name) for name in source.names()}


def _write(
    cfg: RunConfig, checkpoint: Checkpoint, options: Prune, pruned: _Pruned, tokenizer: Tokenizer | None
) -> Path:
    output = Path(options.output)
    step = save_weights(
        output,
        cfg.model_copy(update={"Model": pruned.model}),
        slices_of(pruned.tensors),
        tokenizer=tokenizer,
        source={"pruned": asdict(options), "from": checkpoint.path.name},
        epoch=checkpoint.manifest.epoch,
        step=checkpoint.manifest.step,
    )
    sizes = {name: _size(model) for name, model in (("before", cfg.Model), ("after", pruned.model))}
    report = json.dumps({**sizes, "layers": pruned.layers}, indent=1)
    (output / REPORT_FILE).write_text(report + "\n", "utf-8")
    get_logger().info(f"written: {step}; what stayed of each layer is in {output / REPORT_FILE}")
    print(_table(pruned, **sizes), flush=True)
    return step


def _size(model: ModelConfig) -> dict[str, int]:
    seq_len = model.max_position_embeddings
    return {
        "parameters": parameter_count(model),
        "flops_per_token": flops_per_step(model, 1, seq_len) // (3 * seq_len),
    }


def _table(pruned: _Pruned, before: dict[str, int], after: dict[str, int]) -> str:
    words = {"parameters": "parameters", "flops_per_token": "operations per token, forward"}
    rows = [*pruned.sizes, *((name, before[key], after[key]) for key, name in words.items())]
    lines = [f"{'':30} {'before':>16} {'after':>16} {'share':>7}"]
    lines += [f"{what:30} {old:16,} {new:16,} {new / old:7.1%}" for what, old, new in rows]
    return "\n".join(lines)
