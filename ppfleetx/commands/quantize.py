"""Implement ``ppfleetx quantize``, which stores a checkpoint's weights in 8 or 4 bits."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint.model_only import save_weights
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.commands.checkpoint_verbs import (
    calibration_samples,
    open_model,
    refuse_quantized_or_adapted,
)
from ppfleetx.commands.initialize import start_with
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.compress import CompressConfig, WeightsConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.commands.checkpoint_verbs import Quantize
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

REPORT_FILE = "quantization.json"


def quantize(options: Quantize) -> Path:
    """Quantize the weights of the model that the options name, and write the result as a checkpoint, with a
    report on the rounding errors. Returns the checkpoint's directory.
    """
    weights = _weights(options)
    output = Path(options.output)
    options.check()
    with open_model(options) as (cfg, directory, tokenizer):
        refuse_quantized_or_adapted(cfg, options.checkpoint)
        if not cfg.Model.task.continues_text:
            raise cfg.error("Model.module", "only models that continue text are quantized")
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
    group, rounded = options.group, 8 if options.smooth or options.activations else None
    if options.smooth and group is not None:
        raise ConfigError(
            "is not for --smooth, which rounds each row and each output channel with one scale",
            key="--group",
            value=group,
        )
    if group is not None and (group < 1 or group % 8):
        raise ConfigError(
            "must be a multiple of 8: kernels read 8 input features together", key="--group", value=group
        )
    bits = 8 if options.to == "int8" else 4
    return WeightsConfig(
        bits=bits,
        group_size=group,
        activation_bits=rounded,
        asymmetric=rounded is None or (bits == 4 and not options.smooth),
        skip=options.skip,
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

    trained = cfg.Compress.quantization
    if trained is not None and trained.weight_bits <= weights.bits:  # keep the symmetric grid of the training
        weights = weights.model_copy(update={"asymmetric": False})
    if options.group is None and (weights.asymmetric or weights.bits == 4):
        weights = with_group(cfg.Model, weights)
        if weights.group_size is not None:
            get_logger().info(f"groups of {weights.group_size} input features (--group)")
    rounding = Options(weights, options.method, options.smooth, trained)
    check_options(cfg.Model, rounding)
    checkpoint = open_resolved(resolve_checkpoint(checkpoint_dir, verify=True))
    widest = max(cfg.Model.ffn_size, cfg.Model.hidden_size)
    samples = calibration_samples(cfg, options, tokenizer, min_tokens=widest)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".quantizing-") as temp_dir:
        quantizer = Quantizer(checkpoint, cfg.Model, rounding, Path(temp_dir), samples)
        tensors = quantizer.run()
        compress = CompressConfig(Weights=weights)
        quantized = cfg.model_copy(update={"Compress": compress})
        step = save_weights(
            output,
            quantized,
            tensors,
            tokenizer=tokenizer,
            source={"quantized": asdict(options), "from": checkpoint.path.name},
            epoch=checkpoint.manifest.epoch,
            step=checkpoint.manifest.step,
        )
    (output / REPORT_FILE).write_text(quantizer.report.to_json(), "utf-8")
    get_logger().info(f"written: {step}; the table below is also in {output / REPORT_FILE}")
    print(quantizer.report.table(), flush=True)
    return step
