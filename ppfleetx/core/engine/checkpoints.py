"""What a run starts from, and how it is saved: the engine's side of ``ppfleetx.checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.checkpoint.background import BackgroundManager
from ppfleetx.checkpoint.base import (
    BASE,
    base_fingerprint,
    check_base,
    is_beside_base,
    refuse_without_base,
)
from ppfleetx.checkpoint.convert.weights import with_vocabulary
from ppfleetx.checkpoint.directory import (
    mend_latest,
    newest_complete,
    newest_good,
    open_resolved,
    resolve_checkpoint,
    write_best,
)
from ppfleetx.checkpoint.manager import CheckpointManager
from ppfleetx.checkpoint.manifest import step_directory
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.rng import gather_rng_state, restore_rng_state
from ppfleetx.checkpoint.training import (
    load_masters,
    load_model,
    load_optimizer,
    model_slices,
    optimizer_slices,
)
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.finetuning import FINETUNE_MODULE
from ppfleetx.config.sections import ModelConfig, RunConfig, SaveLoadConfig
from ppfleetx.core.engine.state import TrainState
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.together import gather, joint_errors
from ppfleetx.optims.schedules import Schedule, resume_schedule
from ppfleetx.parallel.runner import Runner
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.core.engine.engine import Engine

Fingerprints = Mapping[str, str | None]

# What decides the function that given weights compute, beyond their names and shapes.
_FUNCTION_KEYS = (
    "num_attention_heads",
    "kv_heads",
    "head_size",
    "hidden_act",
    "normalization",
    "norm_epsilon",
    "sandwich_norm",
    "position_embedding_type",
    "rotary_base",
    "tie_word_embeddings",
)
_WRITTEN_AS = {"kv_heads": "num_query_groups", "head_size": "head_dim"}


@dataclass
class Start:
    """Where a run begins: fresh, from weights alone, or from all of a checkpoint.

    Attributes:
        options: ``Engine.save_load``.
        checkpoint: what is loaded; None for a fresh run.
        resumes: whether optimizer, schedule, data position and generators are taken over too.
        state: progress of the run to begin with.
        ctx: this process's place in the job.
        base_fingerprint: of the frozen weights once they were loaded from ``Model.lora.base``.
    """

    options: SaveLoadConfig
    checkpoint: Checkpoint | None = None
    resumes: bool = False
    state: TrainState = field(default_factory=TrainState)
    ctx: ParallelContext = field(default_factory=ParallelContext.single)
    base_fingerprint: str | None = None

    def restore(
        self, runner: Runner, schedule: Schedule, fingerprints: Fingerprints, model: ModelConfig
    ) -> Schedule:
        """Load into ``runner`` and the generators; return the schedule to go on with.

        Raises:
            CheckpointError: it does not fit the model, the data, the tokenizer or the schedule.
        """
        self._load_base(runner, model)
        if self.checkpoint is None:
            return schedule
        self._load_weights(runner, model, is_new_run=not self.resumes)
        if not self.resumes:
            return schedule
        model_names = runner.model_names()
        with joint_errors(self.ctx):
            _check_fingerprints(self.checkpoint, fingerprints, self.options.reset_data)
            if self.options.load_optim:
                state, parameters = runner.optimizer_state(), runner.named_parameters()
                load_optimizer(state, parameters, self.checkpoint, model_names=model_names)
                runner.load_scaler_state(self.checkpoint.state.get("scaler"))
            if self.options.load_rng:
                self._restore_generators()
            saved = self.checkpoint.state["schedule"]
            return resume_schedule(self.options.lr_schedule, schedule, saved)

    def _restore_generators(self) -> None:
        own = restore_rng_state(self.checkpoint.state, self.ctx)
        if not own and self.ctx.world_size > 1:
            get_logger().info(
                "generators: the checkpoint has none for each rank of this plan; all continue rank 0's "
                "(dropout does not depend on them)"
            )

    def restore_weights(self, runner: Runner, model: ModelConfig) -> None:
        """Load the weights alone, all of them.

        Raises:
            CheckpointError: they are not those of ``model``, or mean another function.
        """
        assert self.checkpoint is not None
        self._load_base(runner, model)
        self._load_weights(runner, model)

    def _load_base(self, runner: Runner, model: ModelConfig) -> None:
        """Load the frozen weights from ``Model.lora.base``, if there is one, and see that it is the one the
        adapters of the checkpoint belong to."""
        place = None if model.lora is None else model.lora.base
        frozen = [name for name in runner.model_names() if not is_beside_base(name)]
        with joint_errors(self.ctx):
            if place is None:
                if self.checkpoint is not None:
                    refuse_without_base(self.checkpoint)
                return
            verify = self.options.verify and self.ctx.is_main
            base = with_vocabulary(open_resolved(resolve_checkpoint(place, verify=verify)), model.vocab_size)
            refuse_without_base(base)
            check_same_function(base, model)
            load_model(
                [(name, p) for name, p in runner.named_parameters() if not is_beside_base(name)],
                base,
                vocab_size=model.vocab_size,
                allow_extra=_left_out(model),
                model_names=frozen,
            )
            self.base_fingerprint = base_fingerprint(base, frozen)
            if self.checkpoint is not None:
                check_base(self.checkpoint, self.base_fingerprint, place)

    def _load_weights(self, runner: Runner, model: ModelConfig, *, is_new_run: bool = False) -> None:
        """Load the checkpoint's weights. A new run may have parameters that it lacks: adapters, and a
        classification head in the place of the model's."""
        model_names, parameters = runner.model_names(), list(runner.named_parameters())
        if self.base_fingerprint is not None:
            model_names = [name for name in model_names if is_beside_base(name)]
            parameters = [(name, p) for name, p in parameters if is_beside_base(name)]
        beside = [name for name in model_names if is_beside_base(name)]
        new = beside if is_new_run else []
        with joint_errors(self.ctx):
            check_same_function(self.checkpoint, model)
            if self.resumes and beside and not set(beside) & set(self.checkpoint.names()):
                raise CheckpointError(
                    f"checkpoint {self.checkpoint.path} is of a model before finetuning (it has no "
                    f"{beside[0]}); to start from its weights, name it in Engine.save_load.init_from"
                )
            weights = with_vocabulary(self.checkpoint, model.vocab_size)
            loaded = load_model(
                parameters,
                weights,
                vocab_size=model.vocab_size,
                allow_missing=model_names if self.options.allow_missing else new,
                allow_extra=self.options.allow_extra or (_left_out(model) if is_new_run else ()),
                allow_other_shapes=self.options.allow_other_shapes,
                model_names=model_names,
            )
            states = {k: tensor for k, tensor in runner.optimizer_state().items() if k[0] in set(loaded)}
            load_masters(states, parameters, weights)


def _left_out(model: ModelConfig) -> tuple[str, ...]:
    """What a pretrained model may have and its finetuning has not: the language model's own head."""
    return ("head.weight", "head.bias") if model.module == FINETUNE_MODULE else ()


def check_same_function(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Refuse weights that have the right shapes but were trained as another function.

    Raises:
        CheckpointError: naming the first key that differs, with both values.
    """
    saved = checkpoint.manifest.config
    if not isinstance(saved, Mapping) or "Model" not in saved:
        return  # a checkpoint of another program, which records no configuration
    trained = ModelConfig(**{k: v for k, v in saved["Model"].items() if k in ModelConfig.model_fields})
    for key in _FUNCTION_KEYS:
        then, now = getattr(trained, key), getattr(model, key)
        if then != now:
            name = f"Model.{_WRITTEN_AS.get(key, key)}"
            raise CheckpointError(
                f"checkpoint {checkpoint.path} was trained with {name} = {then!r}, "
                f"this configuration has {now!r}: the same weights would compute something else; "
                f"set {name} to {then!r}"
            )
    if trained.lora is None:
        return
    if model.lora is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was trained with adapters: give the Model.lora section of that "
            f"run (Model.lora.rank={trained.lora.rank}, Model.lora.alpha={trained.lora.alpha:g}, ...), or "
            "merge them with the weights by tools/merge_lora.py"
        )
    if trained.lora.scale != model.lora.scale:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was trained with Model.lora.alpha / rank = "
            f"{trained.lora.scale:g}, this configuration has {model.lora.scale:g}: "
            "the adapters would weigh otherwise"
        )


def find_start(options: SaveLoadConfig, output_dir: Path | None, ctx: ParallelContext) -> Start:
    """Decide what a run starts from. The main rank decides (and reads the whole checkpoint where it is to
    be verified); the others open what it found.

    In this order: the newest checkpoint of ``output_dir`` when ``resume`` is set, so that the same
    command continues after every interruption; the checkpoint ``ckpt_dir``; the weights ``init_from``;
    nothing.

    Args:
        options: ``Engine.save_load``.
        output_dir: where this run saves; None for a program that saves nothing.
        ctx: this process's place in the job.

    Raises:
        CheckpointError: the checkpoint asked for is missing, incomplete or damaged; on all ranks.
    """
    start = Start(options)
    with joint_errors(ctx, name_ranks=False):
        if ctx.is_main:
            start = _decide(options, output_dir)
    path = None if start.checkpoint is None else str(start.checkpoint.path)
    path, resumes = gather(ctx, (path, start.resumes))[0]
    with joint_errors(ctx):
        if path is not None and not ctx.is_main:
            checkpoint = open_resolved(path)
            start = _start_at(checkpoint, options) if resumes else Start(options, checkpoint)
    start.ctx = ctx
    return start


def _decide(options: SaveLoadConfig, output_dir: Path | None) -> Start:
    if output_dir is not None and options.resume:
        found = _newest(output_dir, options)
        if found is not None:
            return _resume(found, options)
    if options.ckpt_dir is not None:
        checkpoint = open_resolved(resolve_checkpoint(options.ckpt_dir, verify=options.verify))
        return _weights_of(checkpoint, options) if output_dir is None else _resume(checkpoint, options)
    if output_dir is not None:
        _warn_of_older_run(output_dir)
    if options.init_from is not None:
        checkpoint = open_resolved(resolve_checkpoint(options.init_from, verify=options.verify))
        get_logger().info(f"a new run with the weights of {checkpoint.path}")
        return Start(options, checkpoint)
    return Start(options)


class CheckpointSaver:
    """Saves a run's model, optimizer, progress, schedule and generators as one checkpoint; in the
    background with ``Engine.save_load.async_save``."""

    def __init__(
        self, cfg: RunConfig, ctx: ParallelContext, output_dir: Path, fingerprints: Fingerprints
    ) -> None:
        manager = BackgroundManager if cfg.Engine.save_load.async_save else CheckpointManager
        self._ctx, self._trained_alone = ctx, fingerprints.get(BASE) is not None
        self._manager = manager(
            output_dir,
            cfg.Engine.save_load.keep_max,
            ctx=ctx,
            plan=asdict(cfg.plan),
            config=cfg.model_dump(mode="json"),
            fingerprints=dict(fingerprints),
            vocab_size=cfg.Model.vocab_size,
        )

    def save(self, engine: Engine) -> Path:
        """Write the checkpoint of the engine as it stands, or begin to; return where it is or will be."""
        runner = engine.runner
        runner.before_update = self._manager.wait_for_copy
        parameters = [(n, p) for n, p in runner.named_parameters() if runner.writes(p)]
        if self._trained_alone:
            parameters = [(name, p) for name, p in parameters if not p.stop_gradient]
        held = {name for name, _ in parameters}
        states = {key: tensor for key, tensor in runner.optimizer_state().items() if key[0] in held}
        return self._manager.save(
            epoch=engine.state.epoch,
            step=engine.state.step,
            tensors=[*model_slices(parameters), *optimizer_slices(states, parameters)],
            state={
                "train": engine.state.to_json(),
                "schedule": engine.schedule.state(),
                **gather_rng_state(self._ctx),
                "scaler": runner.scaler_state(),
            },
        )

    def mark_best(self, engine: Engine) -> None:
        """Let ``best`` name the checkpoint of the engine as it stands."""
        path = self._manager.output_dir / step_directory(engine.state.epoch, engine.state.step)
        with joint_errors(self._ctx, name_ranks=False):
            if self._ctx.is_main and path.is_dir():  # a run that resumed may have its first elsewhere
                write_best(path, self._manager.keep_max)

    def poll(self) -> None:
        """Carry on with a save in the background."""
        self._manager.poll()

    def wait(self) -> None:
        """Complete a save in the background."""
        self._manager.wait()

    def abandon(self) -> None:
        """End without the other ranks, who may be gone."""
        self._manager.abandon()


def _newest(output_dir: Path, options: SaveLoadConfig) -> Checkpoint | None:
    """The checkpoint to continue in ``output_dir``; ``auto`` passes over damaged ones and says so."""
    if options.resume == "auto":
        found = newest_good(output_dir, verify=options.verify)
        if found is not None:
            mend_latest(found)
        return found
    if newest_complete(output_dir) is None and options.ckpt_dir is not None:
        return None
    return open_resolved(resolve_checkpoint(output_dir, verify=options.verify))


def _resume(checkpoint: Checkpoint, options: SaveLoadConfig) -> Start:
    if "train" not in checkpoint.state:
        get_logger().warning(
            f"{checkpoint.path} holds weights alone: optimizer, step and data position start afresh"
        )
        return Start(options, checkpoint)
    start = _start_at(checkpoint, options)
    get_logger().info(f"resuming {checkpoint.path} (global step {start.state.step})")
    return start


def _weights_of(checkpoint: Checkpoint, options: SaveLoadConfig) -> Start:
    """For a program that does not train: weights, and the steps they were trained for where that is known."""
    start = _start_at(checkpoint, options) if "train" in checkpoint.state else Start(options, checkpoint)
    step = f" (global step {start.state.step})" if start.resumes else ""
    get_logger().info(f"with the weights of {checkpoint.path}{step}")
    return start


def _start_at(checkpoint: Checkpoint, options: SaveLoadConfig) -> Start:
    state = TrainState.from_json(checkpoint.state["train"])
    if options.reset_data:
        state.consumed_samples = state.epoch = 0
    return Start(options, checkpoint, resumes=True, state=state)


def _warn_of_older_run(output_dir: Path) -> None:
    older = newest_complete(output_dir)
    if older is not None:
        get_logger().warning(
            f"{output_dir} already holds checkpoints of an earlier run (newest: {older.name}); this run "
            "starts anew, will replace those of the same step, and until its first save resume=auto would "
            "continue the earlier one. -o Engine.save_load.resume=auto now would do so too"
        )


def _check_fingerprints(checkpoint: Checkpoint, now: Fingerprints, reset_data: bool) -> None:
    saved: Mapping[str, Any] = checkpoint.manifest.fingerprints
    if saved.get("tokenizer") and now.get("tokenizer") and saved["tokenizer"] != now["tokenizer"]:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was trained with another tokenizer than Data.tokenizer names; to "
            "start a new run from its weights all the same, use Engine.save_load.init_from"
        )
    if saved.get("data") != now.get("data") and not reset_data:
        raise CheckpointError(
            f"the training data or its order is not the one checkpoint {checkpoint.path} was reading "
            "(corpus, split, seed, sequence length or number of epochs changed), so its position means "
            "nothing here; "
            "Engine.save_load.reset_data=True starts the data from the beginning"
        )
