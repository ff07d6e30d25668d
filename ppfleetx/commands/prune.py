"""The program of the verb ``prune``. Most mistakes are found before Paddle is loaded, which takes seconds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.directory import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.lazy import LazyTensor
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.weights import lazy, slices_of, with_vocabulary
from ppfleetx.checkpoint.weights_only import save_weights
from ppfleetx.commands.checkpoint_verbs import (
    Prune,
    calibration_samples,
    open_model,
    refuse_unfit,
)
from ppfleetx.commands.start_process import start_with
from ppfleetx.compress.prune import (
    Kept,
    Scores,
    Sizes,
    kept_of,
    magnitude_scores,
    pruned_model,
    pruned_tensors,
    sizes_after,
)
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.models.gpt.spec import flops_per_step, parameter_count
from ppfleetx.utils.log import configure_logging, get_logger

REPORT_FILE = "pruning.json"


def prune(options: Prune) -> Path:
    """Write the smaller model and the report; return its step directory."""
    configure_logging()
    output = Path(options.output)
    _check(options)
    with open_model(options) as (cfg, directory, tokenizer):
        refuse_unfit(cfg, options.checkpoint)
        sizes = sizes_after(
            cfg.Model,
            options.ratio,
            part=options.part,
            multiple=options.multiple,
            drop_layers=options.drop_layers,
        )
        checkpoint = open_resolved(resolve_checkpoint(directory, verify=True))
        scores = _scores(cfg, checkpoint, options, sizes, tokenizer)
        return _write(cfg, checkpoint, options, sizes, scores, tokenizer, output)


def _check(options: Prune) -> None:
    options.check()
    if options.criterion == "saliency" and options.calibration is None:
        raise ConfigError(
            "looks at what the loss would lose: give --calibration DATA", key="--criterion", value="saliency"
        )
    if options.criterion != "saliency" and options.calibration is not None:
        raise ConfigError("is read with --criterion saliency only", key="--calibration")


def _scores(
    cfg: RunConfig, checkpoint: Checkpoint, options: Prune, sizes: Sizes, tokenizer: Tokenizer | None
) -> dict[int, Scores]:
    samples = calibration_samples(cfg, options, tokenizer, fewest=1)
    if samples is None:
        tensors = _tensors(checkpoint, cfg)
        return {i: magnitude_scores(tensors, cfg.Model, i, options.criterion) for i in sizes.layers}
    cfg, _ = start_with(cfg)
    from ppfleetx.compress.saliency import saliency_scores

    return saliency_scores(checkpoint, cfg.Model, samples.calibration)


def _tensors(checkpoint: Checkpoint, cfg: RunConfig) -> dict[str, LazyTensor]:
    source = with_vocabulary(checkpoint, cfg.Model.vocab_size)
    return {name: lazy(source, name) for name in source.names()}


def _write(
    cfg: RunConfig,
    checkpoint: Checkpoint,
    options: Prune,
    sizes: Sizes,
    scores: dict[int, Scores],
    tokenizer: Tokenizer | None,
    output: Path,
) -> Path:
    kept = {layer: kept_of(scores[layer], sizes) for layer in sizes.layers}
    small = cfg.model_copy(update={"Model": pruned_model(cfg.Model, sizes)})
    tensors = dict(pruned_tensors(_tensors(checkpoint, cfg), cfg.Model, sizes, kept))
    step = save_weights(
        output,
        small,
        slices_of(tensors),
        tokenizer=tokenizer,
        source={"pruned": asdict(options), "from": checkpoint.path.name},
        epoch=checkpoint.manifest.epoch,
        step=checkpoint.manifest.step,
    )
    report = _report(cfg, small, sizes, kept)
    (output / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    get_logger().info(f"written: {step}; what stayed of each layer is in {output / REPORT_FILE}")
    print(_table(cfg, small, report), flush=True)
    return step


def _report(cfg: RunConfig, small: RunConfig, sizes: Sizes, kept: dict[int, Kept]) -> dict[str, Any]:
    seq_len = cfg.Model.max_position_embeddings
    return {
        name: {
            "parameters": parameter_count(one.Model),
            "flops_per_token": flops_per_step(one.Model, 1, seq_len) // (3 * seq_len),
        }
        for name, one in (("before", cfg), ("after", small))
    } | {
        "layers": [
            {"was": layer, "groups": kept[layer].groups.tolist(), "units": kept[layer].units.tolist()}
            for layer in sizes.layers
        ]
    }


def _table(cfg: RunConfig, small: RunConfig, report: dict[str, Any]) -> str:
    rows = [
        ("layers", cfg.Model.num_layers, small.Model.num_layers),
        ("attention heads", cfg.Model.num_attention_heads, small.Model.num_attention_heads),
        ("key/value heads", cfg.Model.kv_heads, small.Model.kv_heads),
        ("feed-forward units", cfg.Model.ffn_size, small.Model.ffn_size),
        *(
            (words, report["before"][key], report["after"][key])
            for words, key in (
                ("parameters", "parameters"),
                ("operations per token, forward", "flops_per_token"),
            )
        ),
    ]
    lines = [f"{'':30} {'before':>16} {'after':>16} {'share':>7}"]
    lines += [f"{what:30} {before:16,} {after:16,} {after / before:7.1%}" for what, before, after in rows]
    return "\n".join(lines)
