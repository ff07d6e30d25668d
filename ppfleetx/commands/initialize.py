"""Prepare a process: read and check the configuration, and only then import Paddle, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint.resolve_checkpoint import newest_complete, resolve_checkpoint
from ppfleetx.config.errors import CheckpointError, ConfigError, naming
from ppfleetx.config.ineffective_options import refuse_absent, without_effect
from ppfleetx.config.loader import ConfigSource, load_config
from ppfleetx.config.sections.root import data_sets
from ppfleetx.core.engine.check_output_dir import CKPT_DIR, check_start, output_dir_of
from ppfleetx.core.engine.training_watchdog import watch_start
from ppfleetx.data.build import build_dataset, open_corpora
from ppfleetx.resilience.progress import MEETING, PROGRESS
from ppfleetx.utils.device_support import expected_device, not_supported_reasons
from ppfleetx.utils.launcher_env import rank, refuse_other_launchers, world_size
from ppfleetx.utils.log import configure_logging
from ppfleetx.utils.output_files import why_not_writable
from ppfleetx.utils.process_env import import_paddle, prepare_process

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig
    from ppfleetx.distributed.context import ParallelContext


def initialize(
    path: ConfigSource, overrides: Sequence[str], *, reads: Sequence[str] = ()
) -> tuple[RunConfig, ParallelContext]:
    """Read a configuration, check that it can run, choose the device and connect the ranks. Returns the
    configuration and this process's parallel context.

    Args:
        reads: the sections of ``Data`` that the program will read, such as ``Train``.

    Raises:
        UserError: the configuration is invalid or not supported, or a file or a library is missing.
    """
    return start_with(load_config(path, overrides, world_size=world_size()), reads=reads)


def start_with(cfg: RunConfig, *, reads: Sequence[str] = ()) -> tuple[RunConfig, ParallelContext]:
    """Check that the loaded configuration ``cfg`` can run, choose the device and connect the ranks. Returns
    ``cfg`` and this process's parallel context.

    Args:
        reads: the sections of ``Data`` that the program will read, such as ``Train``.

    Raises:
        UserError: the configuration is invalid or not supported, or a file or a library is missing.
    """
    if "Train" in reads:
        refuse_other_launchers()
    main = rank() == 0
    logger = configure_logging(quiet=not main and not cfg.plan.reports_loss(rank()))
    for warning in (*cfg.warnings, *without_effect(cfg)) if main else ():
        logger.warning(warning)
    device = expected_device(cfg.Global.device, cfg.origins.get("Global.device"))
    if reasons := not_supported_reasons(cfg, device):
        raise ConfigError("this configuration is valid, but cannot run yet:\n  " + "\n  ".join(reasons))
    if "Train" in reads and not cfg.Model.task.trains:
        raise cfg.error("Model.module", "only evaluates (ppfleetx eval); to train use GPTModule")
    if cfg.plan.world_size == 1:  # the ranks of a job check this later, all together
        _look_for_files(cfg, reads)
    if "Train" in reads:
        watch_start(cfg, rank(), device)
    said = prepare_process(device=device)
    import_paddle()
    logger.info(said)
    from ppfleetx.core.engine.rank_consistency import check_configuration
    from ppfleetx.distributed.device import allow_tf32, is_gpu
    from ppfleetx.distributed.init import init_distributed

    tf32 = allow_tf32(cfg.Global.allow_tf32)  # set before Global.flags, which may override it
    with PROGRESS.at(MEETING):
        ctx = init_distributed(cfg)
    if is_gpu(ctx.device):
        logger.info(tf32)
    check_configuration(cfg, ctx)
    return cfg, ctx


def _look_for_files(cfg: RunConfig, reads: Sequence[str]) -> None:
    """Raise UserError if a corpus or checkpoint is missing or, for training, ``output_dir`` holds another
    run."""
    for mode in reads:
        if mode == "Test" and not cfg.Model.task.classifies:
            continue  # only classifiers read Data.Test
        for one in data_sets(cfg, mode).values():
            look = open_corpora if getattr(one.Data, mode).dataset.is_corpus else build_dataset
            look(one, mode)
    refuse_foreign_weights(cfg)
    if "Train" in reads:
        refuse_absent(cfg)
        check_start(cfg)
    for key, directory in cfg.weight_sources():
        if _will_be_loaded(key, cfg, trains="Train" in reads):
            try:
                with naming(key, directory):
                    resolve_checkpoint(directory, verify=False)
            except CheckpointError as error:
                if key != _BASE:
                    raise
                advice = f". If the weights that the adapters belong to have moved: -o {_BASE}=DIR"
                raise CheckpointError(f"{error}{advice}") from error


_BASE = "Model.lora.base"


def made_directory(cfg: RunConfig, key: str) -> Path:
    """Create the directory that the configuration key ``key`` names, and return its path. Raises ConfigError
    if the directory cannot be written."""
    path = Path(cfg.value_of(key))
    if rule := why_not_writable(path):
        raise cfg.error(key, rule)
    path.mkdir(parents=True, exist_ok=True)
    return path


def refuse_foreign_weights(cfg: RunConfig) -> None:
    """Raise UserError if the configuration names weights of another toolkit that must be converted first."""
    if any(cfg.weight_sources()):
        from ppfleetx.conversion.detect import refuse_foreign  # slow to import, because it knows many formats

        refuse_foreign(cfg)


def _will_be_loaded(key: str, cfg: RunConfig, *, trains: bool) -> bool:
    """Return whether the program will load the weights that the configuration key ``key`` names. ``trains``
    is whether the program trains."""
    if key == _BASE:
        return True
    if not trains:  # init_from only names the weights from which the run once started
        return key == CKPT_DIR
    # A run that resumes loads the weights of its own checkpoint.
    goes_on = cfg.Engine.save_load.resume and newest_complete(output_dir_of(cfg)) is not None
    return not goes_on
