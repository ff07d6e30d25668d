"""Export a model with its tokenizer to a directory from which Paddle Inference can generate text."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint.output_dir import publish
from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint
from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.check_output_dir import directory_error
from ppfleetx.deploy.export_dir import (
    PROGRAM,
    RANK_DIRECTORY,
    TOKENIZER_DIRECTORY,
    ExportManifest,
    describe_files,
    foreign_files,
    is_export,
)
from ppfleetx.distributed.device import is_card
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import exclusive_lock, is_taken, why_not_writable
from ppfleetx.utils.progress_bar import ProgressBar

if TYPE_CHECKING:
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.generation.generator import Generator

_KEY = "Engine.save_load.output_dir"
_UNFINISHED = f".{RANK_DIRECTORY}.exporting"


def export(cfg: RunConfig, ctx: ParallelContext, generator: Generator) -> Path:
    """Export the model of ``generator`` to ``Engine.save_load.output_dir``/rank_0, and return this directory.
    An earlier export in this directory is replaced. Raises UserError if the export cannot be written."""
    output_dir = Path(cfg.Engine.save_load.output_dir)
    target, unfinished = output_dir / RANK_DIRECTORY, output_dir / _UNFINISHED
    busy = ConfigError("another export into this directory is under way", key=_KEY, value=str(output_dir))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(output_dir / ".export.lock", busy):
            shutil.rmtree(unfinished, ignore_errors=True)  # left over from a killed export
            unfinished.mkdir()
            try:
                use_panels = cfg.Inference.panels and not is_card(ctx.device)
                with ProgressBar("exporting", total=None, unit="program"):
                    _write(unfinished, cfg, generator, use_panels)
                check_target(cfg)
                publish(unfinished, target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise directory_error(cfg, f"cannot be written: {error.strerror or error}") from error
    saved = os.path.join(cfg.Engine.save_load.output_dir, RANK_DIRECTORY, PROGRAM)  # noqa: PTH118 as given
    get_logger().info(f"export inference model saved in {saved}")
    return target


def check_adapters(cfg: RunConfig) -> None:
    """Raise ConfigError if the model has LoRA adapters on quantized weights, which cannot be exported."""
    if cfg.Model.lora is not None and cfg.Compress.Weights is not None:
        raise ConfigError(
            "adds adapters to quantized weights, which cannot be exported. Merge them into the weights "
            "(`ppfleetx merge DIR --output MERGED`), quantize the result, and export that",
            key="Model.lora",
            place=cfg.origins.get("Model.lora.rank"),
        )


def check_positions(cfg: RunConfig) -> None:
    """Raise ConfigError for a LongRoPE model whose rotary angles change at a length below the model's
    maximum. When a sequence exceeds this length, its cached keys must be recomputed, which an exported
    program cannot do."""
    scaling, longest = cfg.Model.rope_scaling, cfg.Model.max_position_embeddings
    if scaling is not None and (length := scaling.switch_length(longest)) is not None:
        raise ConfigError(
            f"is longrope, which uses other rotary angles for rows of more than {length} tokens: cached keys "
            "would have to be recomputed, which an exported program cannot do. Export the model for "
            f"shorter rows (-o Model.max_position_embeddings={length}), or use the checkpoint itself: "
            "ppfleetx generate, chat or serve",
            key="Model.rope_scaling",
            place=cfg.origins.get("Model.rope_scaling.type"),
        )


def check_one_process(processes: int) -> None:
    """Raise ConfigError if the job has several processes, because an exported program cannot communicate."""
    if processes > 1:
        raise ConfigError(
            f"{processes} processes were started, but one makes an export (--nproc_per_node 1): Paddle's "
            "export silently leaves out communication, so a part of a model would compute wrong "
            "numbers. The parts of a checkpoint of any plan are merged into one program. A model that is too "
            "large for one machine's memory cannot be exported: generate from its checkpoint with "
            "ppfleetx generate under Distributed.mp_degree"
        )


def check_target(cfg: RunConfig) -> None:
    """Raise ConfigError if the export cannot be written to ``output_dir``/rank_0, for example because this
    directory has files that do not belong to an earlier export."""
    output_dir = Path(cfg.Engine.save_load.output_dir)
    target = output_dir / RANK_DIRECTORY
    rule = why_not_writable(output_dir)
    if rule is not None:
        raise directory_error(cfg, rule)
    is_used = is_taken(target)
    if is_used and not is_export(target):
        raise directory_error(
            cfg, f"{target} exists and is not an export of this program; remove it or name another directory"
        )
    if is_used and (others := foreign_files(target)):
        raise directory_error(
            cfg,
            f"{target} would be replaced, but contains {shown(others[0])}, which is not part of the export",
        )


def _write(directory: Path, cfg: RunConfig, generator: Generator, use_panels: bool) -> None:
    import paddle

    from ppfleetx.deploy.static.program import INPUTS, save_program

    tokenizer = generator.tokenizer
    next_token, program = generator.next_token_model, directory / PROGRAM
    save_program(next_token, generator.max_positions, program, use_panels=use_panels)
    tokenizer.save(directory / TOKENIZER_DIRECTORY)
    settings = cfg.Generation.model_dump(mode="json", exclude_unset=True, exclude={"prompt", "prompt_file"})
    ExportManifest(
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.eod_id,
        end_token=tokenizer.eod_token,
        max_positions=generator.max_positions,
        model=cfg.Model.model_dump(mode="json"),
        generation=settings,
        tokenizer_fingerprint=tokenizer.fingerprint,
        checkpoint=resolve_checkpoint(cfg.Engine.save_load.ckpt_dir).name,
        inputs={name: dtype for name, dtype, _ in INPUTS},
        paddle_version=paddle.__version__,
        files=describe_files(directory),
    ).write(directory)
