"""From a command line to a process that is ready: configuration first, Paddle last."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.core.support import refuse_unsupported
from ppfleetx.utils.log import configure_logging
from ppfleetx.utils.process_env import import_paddle, prepare_process

if TYPE_CHECKING:
    from ppfleetx.config.sections import RunConfig
    from ppfleetx.distributed.context import ParallelContext


def start_process(path: str, overrides: Sequence[str]) -> tuple[RunConfig, ParallelContext]:
    """Read the configuration, refuse what cannot run, and only then load Paddle and choose the device.

    Raises:
        ConfigError: anything wrong or not supported, before any device work.
    """
    cfg = load_config(path, overrides, world_size=world_size(os.environ))
    logger = configure_logging(quiet=rank(os.environ) != 0)
    for warning in cfg.warnings:
        logger.warning(warning)
    refuse_unsupported(cfg)
    said = prepare_process(device="gpu" if cfg.Global.device == "gpu" else "cpu")
    import_paddle()
    logger.info(said)
    from ppfleetx.distributed.init import init_distributed

    return cfg, init_distributed(cfg)


def world_size(environ: Mapping[str, str]) -> int:
    """Processes of the job, as Paddle's launcher tells its ranks; 1 without a launcher."""
    return _number(environ, "PADDLE_TRAINERS_NUM", 1)


def rank(environ: Mapping[str, str]) -> int:
    """This process's number in the job."""
    return _number(environ, "PADDLE_TRAINER_ID", 0)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(
            "the launcher's variable is not a number", key=name, value=text, place="environment"
        )
    return int(text)
