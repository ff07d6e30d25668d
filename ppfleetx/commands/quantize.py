"""Wiring of quantisation: from a checkpoint of any kind to a smaller one.

What a user may have got wrong is looked at before Paddle is loaded, which takes seconds.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ppfleetx.checkpoint.directory import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.documents import documents_of
from ppfleetx.checkpoint.writer import save_checkpoint
from ppfleetx.commands.shrinking import calibration_samples, check_request, open_model, refuse_adapters
from ppfleetx.commands.start_process import start_with, world_size
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.plan import ParallelPlan
from ppfleetx.config.sections.compress import CompressConfig, WeightsConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

REPORT_FILE = "quantization.json"


@dataclass(frozen=True)
class Request:
    """What ``ppfleetx quantize`` was asked for; the fields are its options."""

    checkpoint: str
    output: str
    to: Literal["int8", "int4"]
    group: int | None = None
    method: Literal["rtn", "gptq"] = "rtn"
    calibration: str | None = None
    smooth: bool = False
    activations: Literal["int8"] | None = None
    skip: tuple[str, ...] = ()
    samples: int = 64
    config: str | None = None
    override: tuple[str, ...] = ()


def run(request: Request) -> Path:
    """Write the quantised checkpoint and the report; return its step directory.

    Raises:
        UserError: what cannot be quantised, or not so, in words.
    """
    weights = _weights(request)
    output = Path(request.output)
    check_request(request, output)
    if world_size(os.environ) > 1:
        raise ConfigError("one process quantises, layer by layer; the result loads under any plan")
    with open_model(request) as (cfg, directory, tokenizer):
        _check_model(cfg, request.checkpoint)
        cfg, _ = start_with(cfg)
        return _quantize(cfg, directory, request, weights, tokenizer, output)


def _weights(request: Request) -> WeightsConfig:
    if request.method == "gptq" and request.calibration is None:
        raise ConfigError(
            "GPTQ looks at what reaches each layer: give --calibration DATA", key="--method", value="gptq"
        )
    if request.smooth and request.calibration is None:
        raise ConfigError(
            "SmoothQuant looks at what reaches each layer: give --calibration DATA", key="--smooth"
        )
    if request.smooth and request.to != "int8":
        raise ConfigError("goes with --to int8: it makes activations 8 bits too", key="--smooth")
    if request.activations and request.to != "int8":
        raise ConfigError("goes with --to int8: kernels multiply 8 bits by 8 bits", key="--activations")
    if request.to == "int8" and request.group is not None:
        raise ConfigError(
            "is for --to int4; 8 bits have one scale for each output channel",
            key="--group",
            value=request.group,
        )
    if request.to == "int8":
        rounded = 8 if request.smooth or request.activations else None
        return WeightsConfig(bits=8, activation_bits=rounded, skip=request.skip)
    group = request.group
    if group is not None and (group < 1 or group % 8):
        raise ConfigError(
            "must be a multiple of 8: kernels read 8 input features together", key="--group", value=group
        )
    return WeightsConfig(bits=4, group_size=group, skip=request.skip)


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
    request: Request,
    weights: WeightsConfig,
    tokenizer: Tokenizer | None,
    output: Path,
) -> Path:
    from ppfleetx.compress.quantize import Options, Quantizer, check_options, with_group

    if request.to == "int4" and request.group is None:
        weights = with_group(cfg.Model, weights)
        if weights.group_size is not None:
            get_logger().info(f"groups of {weights.group_size} input features (--group)")
    options = Options(weights, request.method, request.smooth, cfg.Compress.quantization)
    check_options(cfg.Model, options)
    checkpoint = open_resolved(resolve_checkpoint(checkpoint_dir, verify=True))
    widest = max(cfg.Model.ffn_size, cfg.Model.hidden_size)
    samples = calibration_samples(cfg, request, tokenizer, fewest=widest)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".quantizing-") as room:
        quantizer = Quantizer(checkpoint, cfg.Model, options, Path(room), samples)
        tensors = quantizer.run()
        compress = CompressConfig(Weights=weights)
        quantized = cfg.model_copy(update={"Compress": compress})
        fingerprints = {"tokenizer": tokenizer.fingerprint} if tokenizer is not None else {}
        made = {"quantized": asdict(request), "from": checkpoint.path.name}
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
