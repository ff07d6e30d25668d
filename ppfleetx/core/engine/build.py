"""Wiring: from a configuration and a context to a run."""

from __future__ import annotations

from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import dump_config
from ppfleetx.config.sections import RunConfig
from ppfleetx.core.check import check_report
from ppfleetx.core.engine.callbacks.base import Callback, EvalRecord
from ppfleetx.core.engine.callbacks.memory import MemoryLog
from ppfleetx.core.engine.callbacks.metrics import MetricsFile
from ppfleetx.core.engine.callbacks.profiler import ProfilerCallback
from ppfleetx.core.engine.callbacks.progress import TrainProgress
from ppfleetx.core.engine.callbacks.train_log import TrainLog
from ppfleetx.core.engine.callbacks.visual_dl import VisualDL, visual_dl_is_installed
from ppfleetx.core.engine.checkpoints import CheckpointSaver, Start, find_start
from ppfleetx.core.engine.engine import Engine
from ppfleetx.core.engine.pace import Pace
from ppfleetx.core.module.registry import build_module
from ppfleetx.data.build import build_dataloader, load_tokenizer
from ppfleetx.data.loader import DataLoader
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.optims.build import build_schedule
from ppfleetx.parallel.apply import parallelize
from ppfleetx.parallel.runner import Runner
from ppfleetx.utils.files import atomic_write
from ppfleetx.utils.log import get_logger


def train(cfg: RunConfig, ctx: ParallelContext) -> None:
    """Train as configured: start or resume, evaluate, save, stop.

    Raises:
        UserError: data, checkpoint or configuration that cannot be trained with, in words.
    """
    if cfg.Data.Train is None:
        raise ConfigError("training needs a corpus", key="Data.Train")
    log = get_logger()
    for line in check_report(cfg).splitlines():
        log.info(line)
    output_dir = make_output_dir(cfg, ctx)
    start = find_start(cfg.Engine.save_load, output_dir)
    tokenizer = load_tokenizer(cfg)
    train_loader = _loader(cfg, ctx, "Train", consumed_samples=start.state.consumed_samples)
    evaluates = cfg.Data.Eval is not None and cfg.Engine.eval_freq
    eval_loader = _loader(cfg, ctx, "Eval") if evaluates else None
    runner = build_runner(cfg, ctx, train=True)
    pace = Pace.of(cfg, train_loader.samples_per_epoch)
    schedule = build_schedule(cfg.Optimizer, pace.max_steps)
    log.info(schedule.describe())
    fingerprints = {
        "data": train_loader.fingerprint,
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
    }
    schedule = start.restore(runner, schedule, fingerprints, cfg.Model.vocab_size)
    engine = Engine(
        cfg,
        ctx,
        runner,
        schedule=schedule,
        saver=CheckpointSaver(cfg, ctx, output_dir, fingerprints),
        callbacks=_callbacks(cfg, output_dir) if ctx.is_main else (),
        samples_per_epoch=train_loader.samples_per_epoch,
        pace=pace,
    )
    engine.state = start.state
    engine.fit(train_loader, eval_loader)


def evaluate(cfg: RunConfig, ctx: ParallelContext) -> EvalRecord:
    """Evaluate the checkpoint ``Engine.save_load.ckpt_dir`` on ``Data.Eval`` and print the result.

    Raises:
        UserError: no such checkpoint or data, or they do not fit the model.
    """
    if cfg.Data.Eval is None:
        raise ConfigError("evaluation needs a corpus", key="Data.Eval")
    start = find_weights(cfg)
    loader = _loader(cfg, ctx, "Eval")
    runner = build_runner(cfg, ctx, train=False)
    start.restore_weights(runner, cfg.Model.vocab_size)
    engine = Engine(cfg, ctx, runner, callbacks=[TrainLog(cfg.Engine.logging_freq)] if ctx.is_main else ())
    engine.state = start.state
    return engine.evaluate(loader)


def find_weights(cfg: RunConfig) -> Start:
    """The checkpoint to evaluate, generate or export with: ``ckpt_dir``, which must be given."""
    if cfg.Engine.save_load.ckpt_dir is None:
        raise ConfigError(
            "names no checkpoint; give -o Engine.save_load.ckpt_dir=DIR (a step directory or an output "
            "directory of a training run)",
            key="Engine.save_load.ckpt_dir",
        )
    return find_start(cfg.Engine.save_load, output_dir=None)


def build_runner(cfg: RunConfig, ctx: ParallelContext, *, train: bool) -> Runner:
    """Model of the configured module under the plan of ``ctx``, with fresh weights."""
    return parallelize(build_module(cfg), cfg, ctx, train=train)


def make_output_dir(cfg: RunConfig, ctx: ParallelContext) -> Path:
    """Create the output directory; the main rank writes the resolved configuration into it.

    Raises:
        ConfigError: it cannot be created or written.
    """
    key, value = "Engine.save_load.output_dir", cfg.Engine.save_load.output_dir
    directory = Path(value)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if ctx.is_main:
            with atomic_write(directory / "config.yaml", "w") as file:
                file.write(dump_config(cfg))
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", key=key, value=value, place=cfg.origins.get(key)
        ) from error
    return directory


def _loader(cfg: RunConfig, ctx: ParallelContext, mode: str, *, consumed_samples: int = 0) -> DataLoader:
    return build_dataloader(
        cfg,
        mode,
        data_rank=ctx.data_rank,
        data_size=ctx.data_size,
        consumed_samples=consumed_samples,
    )


def _callbacks(cfg: RunConfig, output_dir: Path) -> list[Callback]:
    freq = cfg.Engine.logging_freq
    callbacks: list[Callback] = [
        TrainProgress(cfg.Engine.progress_bar),
        TrainLog(freq),
        MetricsFile(output_dir / "metrics.jsonl", freq),
        MemoryLog(),
    ]
    if visual_dl_is_installed():
        callbacks.append(VisualDL(output_dir / "vdl"))
    if cfg.Profiler.enable:
        callbacks.append(ProfilerCallback(cfg.Profiler, output_dir))
    return callbacks
