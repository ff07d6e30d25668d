"""Find the checkpoint from which a run starts, and load all of it or only its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint.adapters import base_fingerprint, check_base, is_adapter_or_head, refuse_without_base
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import (
    complete_checkpoints,
    newest_complete,
    newest_good,
    open_resolved,
    resolve_checkpoint,
)
from ppfleetx.checkpoint.rng import restore_rng_state
from ppfleetx.checkpoint.run_ownership import read_run, run_of
from ppfleetx.checkpoint.state_dict import load_masters, load_model, load_optimizer
from ppfleetx.checkpoint.weights import with_vocabulary
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.resume_policy import Effect, changes
from ppfleetx.config.sections.compress import is_of_quantizer
from ppfleetx.config.sections.engine import SaveLoadConfig
from ppfleetx.config.sections.moe import is_router_load
from ppfleetx.config.sections.root import ModelConfig, RunConfig
from ppfleetx.core.engine.check_output_dir import CKPT_DIR, INIT_FROM, RESUME, output_dir_of
from ppfleetx.core.engine.resume_checks import (
    Fingerprints,
    check_resumed,
    check_same_function,
    log_changes,
    optimizer_state_may_differ,
)
from ppfleetx.core.engine.train_state import TrainState
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather, joint_errors
from ppfleetx.optims.schedules import Schedule, resume_schedule
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.parallel.step_runner import StepRunner


@dataclass
class Start:
    """Where a run starts: from scratch, from a checkpoint's weights, or from a whole checkpoint (resume).

    Attributes:
        checkpoint: the checkpoint to load; None to start from scratch.
        resumes: whether to load the whole checkpoint, not only its weights.
        state: the progress to start with.
        base_fingerprint: hash of the frozen base weights of adapters, once they are loaded.
        found_by: the configuration key that led to the checkpoint, such as ``Engine.save_load.resume``.
    """

    options: SaveLoadConfig
    checkpoint: Checkpoint | None = None
    resumes: bool = False
    state: TrainState = field(default_factory=TrainState)
    ctx: ParallelContext = field(default_factory=ParallelContext.single)
    base_fingerprint: str | None = None
    found_by: str | None = None

    def restore(
        self, runner: StepRunner, schedule: Schedule, fingerprints: Fingerprints, cfg: RunConfig
    ) -> Schedule:
        """Load the weights into ``runner`` and, if the run resumes, the states of the optimizer, the loss
        scale and the random generators. Returns the schedule to continue with.

        Raises:
            CheckpointError: the checkpoint does not fit the model, data, tokenizer, optimizer or schedule.
        """
        self._load_base(runner, cfg.Model)
        if self.checkpoint is None:
            return schedule
        if not self.resumes:
            self._load_weights(runner, cfg.Model, is_new_run=True)
            get_logger().info(f"a new run with the weights of {self.checkpoint.path}")
            if self.found_by != INIT_FROM:
                get_logger().warning(
                    f"{self.checkpoint.path} holds weights only: optimizer, step and data position start "
                    "afresh"
                )
            return schedule
        self._load_weights(runner, cfg.Model)
        with joint_errors(self.ctx):
            changed = check_resumed(self.checkpoint, cfg, fingerprints)
        if self._applied_before("load_optim") and not optimizer_state_may_differ(self.checkpoint, cfg):
            self.options = self.options.model_copy(update={"load_optim": True})
        if changed and changes(self.checkpoint.manifest.config, cfg, (Effect.EVALUATION,)):
            self.state.best, self.state.best_step = None, -1  # the old best value measures something else
        schedule = self._resume(runner, schedule)
        get_logger().info(f"resuming {self.checkpoint.path} (global step {self.state.step})")
        log_changes(self.checkpoint, changed, self.options)
        return schedule

    def reset_data(self, data: str) -> None:
        """Start the data from the beginning if ``Engine.save_load.reset_data`` is set. Does nothing if the
        run already did this at an earlier start, and now resumes with the same data. ``data`` is the hash
        of the training data."""
        if self.resumes and self.options.reset_data:
            is_same = self.checkpoint.manifest.fingerprints.get("data") == data
            if is_same and self._applied_before("reset_data"):
                self.options = self.options.model_copy(update={"reset_data": False})
            else:
                self.state.data_start, self.state.epoch = self.state.consumed_samples, 0

    def _applied_before(self, option: str) -> bool:
        """Return whether this run has already applied ``option``, which is ``load_optim`` or ``reset_data``,
        at an earlier start. This is so if the checkpoint was found by ``resume`` and was saved with the
        current value of the option."""
        saved = self.checkpoint.manifest.config
        if self.found_by != RESUME or not isinstance(saved, Mapping):
            return False
        then = ((saved.get("Engine") or {}).get("save_load") or {}).get(option)
        return then == getattr(self.options, option)

    def _resume(self, runner: StepRunner, schedule: Schedule) -> Schedule:
        model_names = runner.model_names()
        with joint_errors(self.ctx):
            if self.options.load_optim:
                state, parameters = runner.optimizer_state(), runner.named_parameters()
                load_optimizer(state, parameters, self.checkpoint, model_names=model_names)
                runner.load_scaler_state(self.checkpoint.state.get("scaler"))
            if self.options.load_rng:
                own = restore_rng_state(self.checkpoint.state, self.ctx)
                if not own and self.ctx.world_size > 1:
                    get_logger().info(
                        "generators: the checkpoint has no states for the ranks of this plan; all continue "
                        "rank 0's (dropout does not depend on them)"
                    )
            saved = self.checkpoint.state.get("schedule")
            return resume_schedule(self.options.lr_schedule, schedule, saved)

    def restore_weights(self, runner: StepRunner, model: ModelConfig) -> None:
        """Load only the weights into ``runner``, for evaluation, generation and export. Raises
        CheckpointError if the weights do not fit the model's parameters or the settings in ``model``."""
        assert self.checkpoint is not None
        self._load_base(runner, model)
        self._load_weights(runner, model)
        step = f" (global step {self.state.step})" if self.resumes else ""
        get_logger().info(f"with the weights of {self.checkpoint.path}{step}")

    def _load_base(self, runner: StepRunner, model: ModelConfig) -> None:
        """Load the frozen base weights of adapters from ``Model.lora.base``, if it is set. Without it, a
        checkpoint that contains only adapters is refused.

        Raises:
            CheckpointError: the base weights are missing or do not fit, or the adapters were trained on other
                weights.
        """
        place = None if model.lora is None else model.lora.base
        frozen = [name for name in runner.model_names() if not is_adapter_or_head(name)]
        with joint_errors(self.ctx):
            if place is None:
                if self.checkpoint is not None:
                    refuse_without_base(self.checkpoint)
                return
            verify = self.options.verify and self.ctx.is_main
            base = with_vocabulary(open_resolved(resolve_checkpoint(place, verify=verify)), model.vocab_size)
            refuse_without_base(base)
            check_same_function(base, model)
            self._check_quantizers(base, [name for name in frozen if is_of_quantizer(name)])
            load_model(
                [(name, p) for name, p in runner.named_parameters() if not is_adapter_or_head(name)],
                base,
                vocab_size=model.vocab_size,
                allow_extra=self.options.allow_extra or _left_out(model),
                model_names=frozen,
            )
            self.base_fingerprint = base_fingerprint(base, frozen)
            if self.checkpoint is not None:
                check_base(self.checkpoint, self.base_fingerprint, place)

    def _check_quantizers(
        self, checkpoint: Checkpoint, held: Sequence[str], *, may_be_new: bool = False
    ) -> None:
        """Raise CheckpointError if only the model or only the checkpoint has parameters for fake
        quantization. ``held`` lists those of the model. With ``may_be_new`` or ``allow_missing``, the
        checkpoint can lack them. With ``allow_extra``, the model can lack them."""
        stored = [name for name in checkpoint.names() if is_of_quantizer(name)]
        if held and not stored and not (may_be_new or self.options.allow_missing):
            raise CheckpointError(
                f"checkpoint {checkpoint.path} was not trained with Compress.Quantization: it has no scales "
                f"of its layers' inputs ({held[0]}). Set Compress.Quantization.enable to False; or, to "
                "train with quantization from its weights, name it in Engine.save_load.init_from (without "
                "Model.lora)"
            )
        if stored and not held and not self.options.allow_extra:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} was trained with Compress.Quantization: give that section of "
                "its configuration, or go on with its weights as they are and without rounding by "
                "Engine.save_load.allow_extra=True"
            )

    def _load_weights(self, runner: StepRunner, model: ModelConfig, *, is_new_run: bool = False) -> None:
        """Load the checkpoint's weights. In a new run, adapters, scales of fake quantization and a
        classification head may keep their initial values if the checkpoint lacks them."""
        model_names, parameters = runner.model_names(), list(runner.named_parameters())
        if self.base_fingerprint is not None:
            model_names = [name for name in model_names if is_adapter_or_head(name)]
            parameters = [(name, p) for name, p in parameters if is_adapter_or_head(name)]
        beside = [name for name in model_names if is_adapter_or_head(name)]
        quantizers = [name for name in model_names if is_of_quantizer(name)]
        new = [*beside, *(quantizers if model.lora is None else ())] if is_new_run else []
        # These parameters exist only with some kinds of balancing loss, and a run may change the kind.
        loads = [name for name in (*model_names, *self.checkpoint.names()) if is_router_load(name)]
        with joint_errors(self.ctx):
            self._check_quantizers(self.checkpoint, quantizers, may_be_new=not set(quantizers) - set(new))
            check_same_function(self.checkpoint, model, may_stretch=is_new_run)
            if self.resumes and beside and not set(beside) & set(self.checkpoint.names()):
                raise CheckpointError(
                    f"checkpoint {self.checkpoint.path} is from before finetuning (it has no "
                    f"{beside[0]}); to start from its weights, name it in Engine.save_load.init_from"
                )
            weights = with_vocabulary(self.checkpoint, model.vocab_size)
            loaded = load_model(
                parameters,
                weights,
                vocab_size=model.vocab_size,
                new=(*new, *loads),
                allow_missing=self.options.allow_missing,
                allow_extra=self.options.allow_extra or (*loads, *(_left_out(model) if is_new_run else ())),
                allow_other_shapes=self.options.allow_other_shapes,
                model_names=model_names,
            )
            states = {k: tensor for k, tensor in runner.optimizer_state().items() if k[0] in set(loaded)}
            load_masters(states, parameters, weights)


def _left_out(model: ModelConfig) -> tuple[str, ...]:
    return ("head.weight", "head.bias") if model.task.classifies else ()


def find_start(options: SaveLoadConfig, output_dir: Path | None, ctx: ParallelContext) -> Start:
    """Find and open the checkpoint from which a run starts. With ``resume``, this is the newest one in
    ``output_dir``. Without ``resume``, or if it finds none, this is ``ckpt_dir`` or, if that is not set,
    ``init_from``. If ``output_dir`` is None, only ``ckpt_dir`` is considered. All ranks must call this.

    Raises:
        CheckpointError: on all ranks, if the requested checkpoint is missing, incomplete or damaged.
    """
    start = Start(options)
    with joint_errors(ctx, name_ranks=False):
        if ctx.is_main:
            start = _decide(options, output_dir)
    path = None if start.checkpoint is None else str(start.checkpoint.path)
    path, resumes, found_by = gather(ctx, (path, start.resumes, start.found_by))[0]
    with joint_errors(ctx):
        if path is not None and not ctx.is_main:
            checkpoint = open_resolved(path)
            start = _start_at(checkpoint, options) if resumes else Start(options, checkpoint)
    start.ctx, start.found_by = ctx, found_by
    return start


def _decide(options: SaveLoadConfig, output_dir: Path | None) -> Start:
    if output_dir is None:  # a program that does not train
        return _resume(_open(options.ckpt_dir, options), options, CKPT_DIR)
    found = _newest(output_dir, options) if options.resume else None
    if found is not None:
        return _resume(found, options, RESUME)
    if options.ckpt_dir is not None:
        return _resume(_open(options.ckpt_dir, options), options, CKPT_DIR)
    if options.init_from is not None:
        return Start(options, _open(options.init_from, options), found_by=INIT_FROM)
    return Start(options)


def _open(place: str, options: SaveLoadConfig) -> Checkpoint:
    return open_resolved(resolve_checkpoint(place, verify=options.verify))


def _newest(output_dir: Path, options: SaveLoadConfig) -> Checkpoint | None:
    """Return the newest checkpoint of the run in ``output_dir``, or None if the run cannot resume there.

    With ``resume: auto``, damaged checkpoints and those of other runs are skipped, and the result is None if
    nothing else is there. Without ``auto``, the newest checkpoint must be usable, and the result is None only
    if there is no checkpoint and ``ckpt_dir`` is set.

    Raises:
        CheckpointError: without ``auto``, the newest checkpoint is damaged or belongs to another run, or
            there is none and ``ckpt_dir`` is not set.
    """
    record = read_run(output_dir)
    is_eligible = (lambda _: True) if record is None else record.includes
    if options.resume == "auto":
        return newest_good(output_dir, verify=options.verify, is_eligible=is_eligible)
    if newest_complete(output_dir) is None and options.ckpt_dir is not None:
        return None
    try:
        checkpoint = _open(str(output_dir), options)
    except CheckpointError as error:
        if newest_complete(output_dir) is not None:
            raise
        raise CheckpointError(
            f"{RESUME} = True: {error}; {RESUME}=auto begins a new run where there is none"
        ) from error
    if not is_eligible(checkpoint):
        raise CheckpointError(
            f"the run in {output_dir} has no checkpoint yet, and {checkpoint.path} is another run's; "
            "Engine.save_load.resume=auto starts it again from its beginning"
        )
    return checkpoint


def _resume(checkpoint: Checkpoint, options: SaveLoadConfig, found_by: str) -> Start:
    start = _start_at(checkpoint, options) if "train" in checkpoint.state else Start(options, checkpoint)
    start.found_by = found_by
    return start


def _start_at(checkpoint: Checkpoint, options: SaveLoadConfig) -> Start:
    state = TrainState.from_json(checkpoint.state["train"])
    return Start(options, checkpoint, resumes=True, state=state)


def find_sources(cfg: RunConfig, ctx: ParallelContext) -> tuple[RunConfig, Start]:
    """Find the checkpoint from which a training run starts, and the base weights of its adapters. Returns a
    copy of ``cfg`` and the :class:`Start`. In the copy, ``Model.lora.base`` and the ``ckpt_dir`` or
    ``init_from`` in use are replaced by the exact paths of the checkpoints that were found. Raises
    CheckpointError on all ranks if a checkpoint cannot be opened."""
    base = None
    with joint_errors(ctx, name_ranks=False):
        if ctx.is_main:
            base = base_of(cfg)
    base = gather(ctx, None if base is None else str(base))[0]
    if base is not None:
        cfg = cfg.changed("Model", lora=cfg.Model.lora.model_copy(update={"base": base}))
    start = find_start(cfg.Engine.save_load, output_dir_of(cfg), ctx)
    if start.found_by in (CKPT_DIR, INIT_FROM):
        key, place = start.found_by.rpartition(".")[2], str(start.checkpoint.path)
        cfg = cfg.changed("Engine", save_load=cfg.Engine.save_load.model_copy(update={key: place}))
    return cfg, start


def base_of(cfg: RunConfig) -> Path | None:
    """Return the path of the checkpoint with the frozen base weights of adapters, which ``Model.lora.base``
    names. Returns None if the key is not set. Raises CheckpointError if no checkpoint is found.

    If ``Model.lora.base`` is the output directory and the run resumes, this is the newest checkpoint there
    that another run saved, if there is one. The run's own checkpoints are skipped, because they
    have adapters.
    """
    place = None if cfg.Model.lora is None else cfg.Model.lora.base
    if place is None:
        return None
    output_dir = output_dir_of(cfg)
    record = read_run(output_dir) if cfg.Engine.save_load.resume else None
    # Skip the run's own checkpoints, which have adapters.
    if record is not None and Path(place).resolve() == output_dir.resolve():
        others = [path for path in complete_checkpoints(output_dir) if _is_anothers(path, record.run)]
        if others:
            return others[-1]
    return resolve_checkpoint(place)


def _is_anothers(path: Path, run: str) -> bool:
    try:
        return run_of(path) != run
    except CheckpointError:
        return False
