"""The beginning of a run, made by all ranks together: what it starts from, and who owns the directory."""

from __future__ import annotations

from functools import partial

from ppfleetx.checkpoint.housekeeping import describe_os_error
from ppfleetx.checkpoint.ownership import Ownership, read_run
from ppfleetx.config.errors import DataError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.claim import claim
from ppfleetx.core.engine.run_directory import (
    CKPT_DIR,
    INIT_FROM,
    base_of,
    directory_error,
    output_dir_of,
    with_value,
)
from ppfleetx.core.engine.start import Start, find_start
from ppfleetx.core.engine.training_length import TrainingLength
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.together import gather, joint_errors


def find_sources(cfg: RunConfig, ctx: ParallelContext) -> tuple[RunConfig, Start]:
    """What the run starts from, and a configuration that names these very checkpoints.

    Raises:
        CheckpointError: there is no such checkpoint; on all ranks.
    """
    base = None
    with joint_errors(ctx, name_ranks=False):
        if ctx.is_main:
            base = base_of(cfg)
    base = gather(ctx, None if base is None else str(base))[0]
    if base is not None:
        cfg = with_value(cfg, "Model.lora.base", base)
    start = find_start(cfg.Engine.save_load, output_dir_of(cfg), ctx)
    if start.found_by in (CKPT_DIR, INIT_FROM):
        cfg = with_value(cfg, start.found_by, str(start.checkpoint.path))
    return cfg, start


def begin(
    cfg: RunConfig, ctx: ParallelContext, start: Start, length: TrainingLength, tokenizer: Tokenizer | None
) -> Ownership:
    """Make the output directory this run's, when nothing else can be wrong; every rank knows whose it is.

    Raises:
        ConfigError: something in it is neither this run's nor the earlier one's; on all ranks.
    """
    ownership = None
    with joint_errors(ctx, name_ranks=False):
        if ctx.is_main:
            batch_size = cfg.batch.global_batch_size
            _refuse_other_tokenizer(cfg, tokenizer)
            ownership = claim(cfg, start, partial(length.comes_to, start.state, batch_size))
            if tokenizer is not None:
                _save_tokenizer(cfg, tokenizer)
    run = gather(ctx, None if ownership is None else ownership.run)[0]
    return ownership or Ownership(run, cfg.Engine.save_load.keep_max)


def _save_tokenizer(cfg: RunConfig, tokenizer: Tokenizer) -> None:
    """Beside the checkpoints, where generation looks: they stay usable without the corpus' files."""
    try:
        tokenizer.save(output_dir_of(cfg) / "tokenizer")
    except OSError as error:
        raise directory_error(cfg, f"cannot be written: {describe_os_error(error)}") from error


def _refuse_other_tokenizer(cfg: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Where no run has been, a tokenizer is the user's; only an equal one is written over."""
    place = output_dir_of(cfg) / "tokenizer"
    if tokenizer is None or not place.exists() or read_run(output_dir_of(cfg)) is not None:
        return
    try:
        is_equal = Tokenizer.load(place, eod_token=tokenizer.eod_token).fingerprint == tokenizer.fingerprint
    except DataError:
        is_equal = False
    if not is_equal:
        raise directory_error(
            cfg,
            f"{place} is there and is not the tokenizer of Data.tokenizer, which a run writes there; "
            "remove it or give the run another directory",
        )
