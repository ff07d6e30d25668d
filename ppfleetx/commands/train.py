"""Train or evaluate the model of a configuration: build the parts of the run, connect them, and start the
run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint.adapters import BASE
from ppfleetx.checkpoint.config_and_tokenizer import documents_of
from ppfleetx.checkpoint.resolve_checkpoint import named_checkpoint
from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registry import load_target
from ppfleetx.config.sections.root import RunConfig, data_sets
from ppfleetx.core.engine.callbacks.base import Callback, CallbackSetup
from ppfleetx.core.engine.callbacks.build import CallbackList, build_callbacks
from ppfleetx.core.engine.callbacks.device_usage import offload_notes, rank_table
from ppfleetx.core.engine.check_output_dir import output_dir_of
from ppfleetx.core.engine.claim_output_dir import begin, lock_output_dir
from ppfleetx.core.engine.device_errors import OF_EVALUATION, explained_device_errors
from ppfleetx.core.engine.engine import Engine, EvalSets, Loader
from ppfleetx.core.engine.restore import Start, find_sources, find_start
from ppfleetx.core.engine.resume_checks import Fingerprints
from ppfleetx.core.engine.run_view import EvalRecord
from ppfleetx.core.engine.saving import Saver
from ppfleetx.core.engine.train_state import TrainingLength
from ppfleetx.core.engine.training_watchdog import EVALUATION_DIR, watched
from ppfleetx.core.module.build import build_module
from ppfleetx.core.module.classification import predictions_directory, write_predictions
from ppfleetx.data.build import build_dataloader, load_tokenizer
from ppfleetx.data.corpus_checks import token_id_lines, verify_corpora
from ppfleetx.data.dataloader import DataLoader, MicroBatch
from ppfleetx.data.tasks.glue import TASKS
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import first_on_each_node, joint_errors
from ppfleetx.models.evaluator import Evaluator
from ppfleetx.optims.schedules import build_schedule
from ppfleetx.parallel.parallelize import parallelize
from ppfleetx.parallel.step_runner import StepRunner
from ppfleetx.resilience.progress import EVALUATING, PROGRESS
from ppfleetx.utils.launcher_env import local_rank
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.progress_bar import track

if TYPE_CHECKING:
    from ppfleetx.compress.prune_in_training import PruningInTraining


def train(cfg: RunConfig, ctx: ParallelContext, callbacks: Sequence[Callback] = ()) -> Engine:
    """Train as configured: start or resume, evaluate, save, stop. Returns the engine; the trained model is
    ``engine.runner.model``. ``callbacks`` are called after the callbacks of ``Engine.callbacks``. Ranks may
    pass different ``callbacks``."""
    refuse_quantized_weights(cfg)
    if cfg.Data.Train is None:
        raise _without_data("training", "Data.Train.dataset.input_dir")
    log = get_logger()
    for line in check_report(cfg, ctx.device).splitlines():
        log.info(line)
    with contextlib.ExitStack() as stack:
        with joint_errors(ctx, name_ranks=False):
            if ctx.is_main:
                lock_output_dir(cfg, stack)
        stack.enter_context(watched(cfg, ctx))
        stack.enter_context(explained_device_errors(cfg, ctx))
        return _train_in(output_dir_of(cfg), cfg, ctx, callbacks)


def _train_in(output_dir: Path, cfg: RunConfig, ctx: ParallelContext, given: Sequence[Callback]) -> Engine:
    """Train in the directory ``output_dir``, which the caller has locked."""
    log = get_logger()
    cfg, start = find_sources(cfg, ctx)
    callbacks = build_callbacks(CallbackSetup(cfg, ctx, output_dir))
    callbacks.named += [(f"given {number}", one) for number, one in enumerate(given)]
    tokenizer, train_loader, eval_sets = first_on_each_node(ctx, lambda: _data(cfg, ctx, start))
    runner = build_runner(cfg, ctx, train=True, sources=_sources(cfg, train_loader))
    for line in (*rank_table(ctx, runner), *offload_notes(ctx)):
        log.info(line)
    length = TrainingLength.of(cfg, train_loader.samples_per_epoch)
    schedule = build_schedule(cfg.Optimizer, cfg.Optimizer.lr.in_units(length.max_steps, cfg.batch))
    log.info(schedule.describe())
    fingerprints = {
        "data": train_loader.fingerprint,
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
    }
    schedule = start.restore(runner, schedule, fingerprints, cfg)
    if start.base_fingerprint is not None:
        fingerprints[BASE] = start.base_fingerprint
    # Up to here, no file in the directory has changed: a refused run leaves the directory as it was.
    ownership = begin(cfg, ctx, start, length, tokenizer)
    engine = Engine(
        cfg,
        ctx,
        runner,
        schedule=schedule,
        saver=Saver(cfg, ctx, output_dir, fingerprints, ownership, documents_of(cfg, tokenizer)),
        callbacks=callbacks,
        samples_per_epoch=train_loader.samples_per_epoch,
        length=length,
        new_evaluator=evaluator_of(cfg, ctx),
        go_back=partial(_go_back, cfg, ctx, fingerprints, callbacks),
        pruning=_pruning(cfg, ctx, runner, length),
    )
    engine.state = start.state
    if start.resumes:
        with joint_errors(ctx):
            callbacks.load_state(start.checkpoint.state.get("callbacks", {}))
    engine.fit(train_loader, eval_sets)
    return engine


def _go_back(
    cfg: RunConfig,
    ctx: ParallelContext,
    fingerprints: Fingerprints,
    callbacks: CallbackList,
    engine: Engine,
    consumed_samples: int,
) -> Iterator[Sequence[MicroBatch]] | None:
    """Load the run's last checkpoint after a loss spike. Returns an iterator over the batches to continue
    with, or None if there is no checkpoint. The batches start after the first ``consumed_samples`` samples of
    the run, so the data of the spike are skipped."""
    own = {"resume": "auto", "ckpt_dir": None, "init_from": None, "load_optim": True, "load_rng": True}
    options = cfg.Engine.save_load.model_copy(update={**own, "reset_data": False})
    start = find_start(options, output_dir_of(cfg), ctx)
    if not start.resumes:
        return None
    engine.schedule = start.restore(engine.runner, engine.schedule, fingerprints, cfg)
    start.state.skip_to(consumed_samples)
    start.state.data_start = engine.state.data_start
    engine.state = start.state
    with joint_errors(ctx):
        callbacks.load_state(start.checkpoint.state.get("callbacks", {}))
    loader = _loader(cfg, ctx, "Train")
    loader.sampler.start_after(consumed_samples, engine.state.data_start)
    return iter(loader)


def _pruning(
    cfg: RunConfig, ctx: ParallelContext, runner: StepRunner, length: TrainingLength
) -> PruningInTraining | None:
    options = cfg.Compress.pruning
    if options is None:
        return None
    if options.last_step >= length.max_steps:
        raise ConfigError(
            f"must be below {length.max_steps}, the steps of this run",
            key="Compress.Prune.begin_step" if options.end_step is None else "Compress.Prune.end_step",
            value=options.last_step,
        )
    from ppfleetx.compress.prune_in_training import PruningInTraining

    return PruningInTraining(cfg, ctx, runner)


def _sources(cfg: RunConfig, loader: DataLoader) -> list[str]:
    if not cfg.Engine.log_source_loss:
        return []
    if not loader.sources:
        get_logger().info("Engine.log_source_loss: Data.Train is not a blend; its loss is that of one source")
    return loader.sources


def refuse_quantized_weights(cfg: RunConfig) -> None:
    """Raise ConfigError if the model's weights are quantized and it has no adapters, so that nothing can be
    trained."""
    if cfg.Compress.Weights is not None and cfg.Model.lora is None:
        raise ConfigError(
            "describes a quantized checkpoint, whose weights cannot be trained. Train adapters beside them "
            "(-o Model.lora.rank=8), or train the checkpoint it was made from, with Compress.Quantization if "
            "the weights are to adapt to few bits",
            key="Compress.Weights",
            place=cfg.origins.get("Compress.Weights.bits"),
        )


def evaluate(cfg: RunConfig, ctx: ParallelContext) -> list[EvalRecord]:
    """Evaluate the checkpoint ``Engine.save_load.ckpt_dir`` on all of ``Data.Eval``. Logs and returns a
    record for each set. A classifier's predictions, also for ``Data.Test``, are written to
    ``output_dir/predictions``."""
    if cfg.Data.Eval is None:
        raise _without_data(
            "evaluation",
            "Data.Eval.dataset.input_dir",
            ". For the perplexity of a text: `ppfleetx eval MODEL --text FILE`",
        )
    with watched(cfg, ctx, EVALUATION_DIR), explained_device_errors(cfg, ctx, OF_EVALUATION):
        start = find_weights(cfg, ctx)
        sets = first_on_each_node(ctx, lambda: _evaluation_data(cfg, ctx))
        runner = build_runner(cfg, ctx, train=False)
        start.restore_weights(runner, cfg.Model)
        callbacks = build_callbacks(CallbackSetup(cfg, ctx, output_dir_of(cfg), trains=False))
        engine = Engine(cfg, ctx, runner, callbacks=callbacks, new_evaluator=evaluator_of(cfg, ctx))
        engine.state = start.state
        PROGRESS.is_past_start = True
        records = engine.evaluate(sets)
        if cfg.Model.task.classifies and cfg.Data.Test is not None:
            _predict_test(cfg, ctx, runner)
        return records


def _without_data(what: str, key: str, instead: str = "") -> ConfigError:
    return ConfigError(
        f"names no data, and {what} needs some. A corpus PREFIX.bin, PREFIX.idx: -o {key}=PREFIX{instead}",
        key=key,
    )


def evaluator_of(cfg: RunConfig, ctx: ParallelContext, *, has_labels: bool = True) -> Callable[[], Evaluator]:
    """Return a function that creates an evaluator of the configured task. Each evaluation needs a new
    evaluator. ``has_labels`` is False for test data without labels."""
    task, measure = build_module(cfg), cfg.Model.task.measure
    if measure is None:
        return partial(task.evaluator, ctx, has_labels=has_labels)
    get_logger().warning("ModuleTraits.measure: override `evaluator` of the task in its place")
    make = load_target(measure)
    return partial(make, task, ctx, has_labels=has_labels)


def _predict_test(cfg: RunConfig, ctx: ParallelContext, runner: StepRunner) -> None:
    evaluator = evaluator_of(cfg, ctx, has_labels=False)()
    loader = first_on_each_node(ctx, lambda: _loader(cfg, ctx, "Test"))
    with PROGRESS.at(EVALUATING):
        for micro_batches in loader:
            PROGRESS.go_on()
            evaluator.add(runner, micro_batches)
    outputs = evaluator.result().outputs
    dataset = cfg.Data.Test.dataset
    with joint_errors(ctx, name_ranks=False):
        if ctx.is_main:
            task = TASKS[dataset.name]
            write_predictions(predictions_directory(cfg) / task.file_name(dataset.split), task, outputs)


def find_weights(cfg: RunConfig, ctx: ParallelContext) -> Start:
    """Return the checkpoint ``Engine.save_load.ckpt_dir`` as a :class:`Start`, to use its weights without
    training. ``state.step`` of the result is the step at which the checkpoint was saved."""
    named_checkpoint(cfg)
    start = find_start(cfg.Engine.save_load, None, ctx)
    if not start.resumes:
        start.state.step = start.checkpoint.manifest.step
    return start


def build_runner(
    cfg: RunConfig, ctx: ParallelContext, *, train: bool, sources: Sequence[str] = ()
) -> StepRunner:
    """Build the configured model with initial weights, and its runner. ``train`` is whether the model will be
    trained. ``sources`` are the corpora whose losses are logged separately."""
    runner = parallelize(build_module(cfg, sources), cfg, ctx, train=train)
    runner.checks = cfg.Engine.checks
    return runner


def _loader(cfg: RunConfig, ctx: ParallelContext, mode: str) -> DataLoader:
    loader = build_dataloader(cfg, mode, data_rank=ctx.data_rank, data_size=ctx.data_size)
    for line in loader.describe().splitlines():
        get_logger().info(line)
    return loader


def _evaluation_data(cfg: RunConfig, ctx: ParallelContext) -> EvalSets:
    sets = _eval_sets(cfg, ctx)
    _verify(cfg, ["Eval"])
    return {name: _with_bar(loader, name, ctx) for name, loader in sets.items()}


def _with_bar(loader: Loader, name: str | None, ctx: ParallelContext) -> Loader:
    what = "evaluating" if name is None else f"evaluating {name}"
    return track(loader, what, total=None, unit="batch", show="auto" if ctx.is_main else False)


def _eval_sets(cfg: RunConfig, ctx: ParallelContext) -> EvalSets:
    return {name: _loader(one, ctx, "Eval") for name, one in data_sets(cfg).items()}


def _data(
    cfg: RunConfig, ctx: ParallelContext, start: Start
) -> tuple[Tokenizer | None, DataLoader, EvalSets]:
    evaluates = cfg.Data.Eval is not None and cfg.Engine.eval_freq
    for line in token_id_lines(cfg):
        get_logger().info(line)
    tokenizer, train_loader = load_tokenizer(cfg), _loader(cfg, ctx, "Train")
    start.reset_data(train_loader.fingerprint)
    train_loader.sampler.start_after(start.state.consumed_samples, start.state.data_start)
    eval_sets = _eval_sets(cfg, ctx) if evaluates else {}
    _verify(cfg, ["Train", "Eval"] if evaluates else ["Train"])
    return tokenizer, train_loader, eval_sets


def _verify(cfg: RunConfig, modes: Sequence[str]) -> None:
    if local_rank() == 0:
        verify_corpora(cfg, modes)
