"""The verb ``quantize``. Most mistakes are found before Paddle is loaded, which takes seconds."""

from __future__ import annotations

import os
import tempfile
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ppfleetx.checkpoint.directory import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.documents import documents_of
from ppfleetx.checkpoint.writer import save_checkpoint
from ppfleetx.commands.checkpoint_verbs import (
    ShrinkingOptions,
    calibration_samples,
    open_model,
    refuse_adapters,
)
from ppfleetx.commands.options import option, repeated, switch
from ppfleetx.commands.start_process import start_with, world_size
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.plan import ParallelPlan
from ppfleetx.config.sections.compress import CompressConfig, WeightsConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

REPORT_FILE = "quantization.json"


@dataclass(frozen=True, kw_only=True)
class Quantize(ShrinkingOptions):
    """Store the weights of a checkpoint in 8 or 4 bits.

    CHECKPOINT is the directory of a run, of one of its checkpoints, of Hugging Face or of FleetX. The result
    is a checkpoint that generates, evaluates, serves and exports like any other, under any plan, and is not
    trained. The word embedding and the head have 8 bits whatever the others have.
    """

    examples = """\
examples:
  ppfleetx quantize output --to int8 --output output-int8
  ppfleetx quantize output --to int4 --method gptq --calibration data/train --output output-int4
  ppfleetx quantize output --to int8 --smooth --calibration data/train --output output-w8a8
  ppfleetx quantize output-of-qat --to int8 --activations int8 --output output-int8
  ppfleetx generate output-int8 "Once upon a time"
"""
    to: Literal["int8", "int4"] = option(
        "bits of the weights; 8 with a scale for each output channel, 4 with one for each group",
        default=MISSING,
    )
    group: int | None = option(
        "input features of a group, a multiple of 8 (int4; default: the largest of 128, 64, 32, 16 and "
        "8 that divides those of all layers)"
    )
    method: Literal["rtn", "gptq"] = option(
        "round to the nearest (default), or let later weights make up for the error (GPTQ)", default="rtn"
    )
    smooth: bool = switch(
        "8 bits for activations too, after their outliers were moved into the weights (SmoothQuant)"
    )
    activations: Literal["int8"] | None = option(
        "8 bits for activations, as --smooth gives them, but weights stay where they are: for a "
        "model that was trained with quantisation"
    )
    skip: tuple[str, ...] = repeated(
        "leave layers as they are, by canonical name: head, embedding.*, '*.mlp.fc2'; may be repeated",
        metavar="PATTERN",
    )

    def run(self) -> None:
        """Quantise, and print what that did to each layer."""
        quantize(self)


def quantize(options: Quantize) -> Path:
    """Write the quantised checkpoint and the report; return its step directory.

    Raises:
        UserError: what cannot be quantised, or not so, in words.
    """
    weights = _weights(options)
    output = Path(options.output)
    options.check()
    if world_size(os.environ) > 1:
        raise ConfigError("one process quantises, layer by layer; the result loads under any plan")
    with open_model(options) as (cfg, directory, tokenizer):
        _check_model(cfg, options.checkpoint)
        cfg, _ = start_with(cfg)
        return _quantize(cfg, directory, options, weights, tokenizer, output)


def _weights(options: Quantize) -> WeightsConfig:
    if options.method == "gptq" and options.calibration is None:
        raise ConfigError(
            "GPTQ looks at what reaches each layer: give --calibration DATA", key="--method", value="gptq"
        )
    if options.smooth and options.calibration is None:
        raise ConfigError(
            "SmoothQuant looks at what reaches each layer: give --calibration DATA", key="--smooth"
        )
    if options.smooth and options.to != "int8":
        raise ConfigError("goes with --to int8: it makes activations 8 bits too", key="--smooth")
    if options.activations and options.to != "int8":
        raise ConfigError("goes with --to int8: kernels multiply 8 bits by 8 bits", key="--activations")
    if options.to == "int8" and options.group is not None:
        raise ConfigError(
            "is for --to int4; 8 bits have one scale for each output channel",
            key="--group",
            value=options.group,
        )
    if options.to == "int8":
        rounded = 8 if options.smooth or options.activations else None
        return WeightsConfig(bits=8, activation_bits=rounded, skip=options.skip)
    group = options.group
    if group is not None and (group < 1 or group % 8):
        raise ConfigError(
            "must be a multiple of 8: kernels read 8 input features together", key="--group", value=group
        )
    return WeightsConfig(bits=4, group_size=group, skip=options.skip)


def _check_model(cfg: RunConfig, place: str) -> None:
    if cfg.Compress.Weights is not None:
        raise CheckpointError(
            f"{place} is quantised already (Compress.Weights in its configuration), and rounding twice loses "
            "more than once: quantise the checkpoint it was made from"
        )
    refuse_adapters(cfg, place)
    if not cfg.Model.task.continues_text:
        raise ConfigError(
            "only models that continue text are quantised", key="Model.module", value=cfg.Model.module
        )


def _quantize(
    cfg: RunConfig,
    checkpoint_dir: Path,
    options: Quantize,
    weights: WeightsConfig,
    tokenizer: Tokenizer | None,
    output: Path,
) -> Path:
    from ppfleetx.compress.quantize import Options, Quantizer, check_options, with_group

    if options.to == "int4" and options.group is None:
        weights = with_group(cfg.Model, weights)
        if weights.group_size is not None:
            get_logger().info(f"groups of {weights.group_size} input features (--group)")
    rounding = Options(weights, options.method, options.smooth, cfg.Compress.quantization)
    check_options(cfg.Model, rounding)
    checkpoint = open_resolved(resolve_checkpoint(checkpoint_dir, verify=True))
    widest = max(cfg.Model.ffn_size, cfg.Model.hidden_size)
    samples = calibration_samples(cfg, options, tokenizer, fewest=widest)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".quantizing-") as room:
        quantizer = Quantizer(checkpoint, cfg.Model, rounding, Path(room), samples)
        tensors = quantizer.run()
        compress = CompressConfig(Weights=weights)
        quantized = cfg.model_copy(update={"Compress": compress})
        fingerprints = {"tokenizer": tokenizer.fingerprint} if tokenizer is not None else {}
        made = {"quantized": asdict(options), "from": checkpoint.path.name}
        step = save_checkpoint(
            output,
            epoch=checkpoint.manifest.epoch,
            step=checkpoint.manifest.step,
            tensors=tensors,
            state={"source": made},
            plan=asdict(ParallelPlan()),
            config=quantized.model_dump(mode="json"),
            fingerprints=fingerprints,
            vocab_size=cfg.Model.vocab_size,
            documents=documents_of(quantized, tokenizer),
        )
    (output / REPORT_FILE).write_text(quantizer.report.to_json(), "utf-8")
    get_logger().info(f"written: {step}; the table below is also in {output / REPORT_FILE}")
    print(quantizer.report.table(), flush=True)
    return step
