"""Start and stop this process's watchdog, a thread that reports when training hangs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ppfleetx.config.errors import UserError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.check_output_dir import output_dir_of
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather
from ppfleetx.resilience import watchdog
from ppfleetx.resilience.hang_report import HANG_DIRS, Identity
from ppfleetx.utils.exit_codes import EXIT_HUNG
from ppfleetx.utils.lost_peers import ended_peer_in, may_end_process

HANG_DIR, EVALUATION_DIR, GENERATION_DIR = HANG_DIRS
"""Directories for the hang reports of training, evaluation and generation. They are separate, because the
three programs can run at the same time in one output directory."""


def watch_start(cfg: RunConfig, rank: int, device: str) -> None:
    """Start the watchdog before Paddle is imported, so that a job that hangs while starting is reported as
    well. Does nothing if ppfleetx must not end the process, for example if another program imported
    ppfleetx."""
    if may_end_process():
        _begin(cfg, rank, device, HANG_DIR)


@contextmanager
def watched(cfg: RunConfig, ctx: ParallelContext, directory: str = HANG_DIR) -> Iterator[None]:
    """Context manager that runs this process's watchdog, which writes hang reports to ``directory`` inside
    the output directory. If :func:`watch_start` has already started a watchdog, that one keeps running, with
    its own directory. If ``Engine.hang_timeout`` is 0, no watchdog runs. All ranks must call this."""
    if watchdog.current() is None:
        _begin(cfg, ctx.rank, ctx.device, directory)
    if cfg.Engine.hang_timeout and ctx.world_size > 1:
        # If the job hangs, each watchdog checks which processes of other ranks on its machine are alive.
        watchdog.remember_peers(dict(enumerate(gather(ctx, watchdog.own_process()))))
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        watch = watchdog.current()
        if watch is not None:
            watch.report_failure(error, lost=ended_peer_in(error) is not None, at_end=may_end_process())
        raise
    finally:
        watchdog.finish()


def _begin(cfg: RunConfig, rank: int, device: str, directory: str) -> None:
    engine = cfg.Engine
    limits = watchdog.Limits(
        timeout=engine.hang_timeout,
        start_timeout=engine.hang_start_timeout,
        ends=engine.on_hang == "stop" and may_end_process(),
        counts_work=device == "cpu",
    )
    who = Identity(rank, cfg.plan.world_size)
    watchdog.begin(who, limits, output_dir_of(cfg) / directory, end=_end)


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_HUNG)
