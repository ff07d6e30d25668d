"""The training loop: read a batch, run a step, call the callbacks, evaluate, save, stop."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ppfleetx.config.errors import UserError
from ppfleetx.config.message_text import counted
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.callbacks.build import CallbackList
from ppfleetx.core.engine.callbacks.device_usage import device_name
from ppfleetx.core.engine.rank_consistency import RankConsistency
from ppfleetx.core.engine.run_view import EvalRecord, StepRecord
from ppfleetx.core.engine.saving import Saver
from ppfleetx.core.engine.train_state import TrainingLength, TrainState
from ppfleetx.data.dataloader import MicroBatch, shortened
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import any_rank, raise_on_all_ranks
from ppfleetx.models.evaluator import Evaluator, TokenLoss
from ppfleetx.optims.schedules import Schedule
from ppfleetx.parallel.step_runner import NonFiniteError, StepRunner
from ppfleetx.planner.mfu import Utilization, run_utilization
from ppfleetx.resilience.flight_recorder import RECORD
from ppfleetx.resilience.loss_spikes import Spike, SpikeGuard
from ppfleetx.resilience.progress import EVALUATING, PROGRESS, READING, RESTING, STEPPING
from ppfleetx.resilience.stop_request import StopRequest
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.compress.prune_in_training import PruningInTraining

Loader = Iterable[Sequence[MicroBatch]]
EvalSets = Mapping[str | None, Loader]
"""The batches of each evaluation set, by the name of the set, in the order of the configuration. If
``Data.Eval.sets`` is not used, there is one set, and its name is None."""

NO_TRAINING = TrainingLength(max_steps=0)


class TrainingStoppedError(UserError):
    """Training cannot continue, for example because a loss is not finite or the data has ended."""


GoBack = Callable[["Engine", int], Iterator[Sequence[MicroBatch]] | None]


class Engine:
    """Trains and evaluates a model. ``runner`` executes the steps; the engine handles samples, callbacks and
    checkpoints.

    Args:
        schedule: the schedule of learning rate and weight decay; None if the engine only evaluates.
        saver: writes checkpoints; None if the engine only evaluates.
        samples_per_epoch: number of samples in one pass over the training split.
        length: number of steps to train, and the intervals of evaluations and checkpoints.
        new_evaluator: creates the evaluator for one evaluation set.
        go_back: a function that loads the run's last checkpoint after a loss spike. It is called with the
            engine and the number of consumed samples up to and including the spike, after which training
            continues. It returns the batches that follow, or None if there is no checkpoint.
        pruning: prunes the model while it trains; None for no pruning.
    """

    def __init__(
        self,
        cfg: RunConfig,
        ctx: ParallelContext,
        runner: StepRunner,
        *,
        schedule: Schedule | None = None,
        saver: Saver | None = None,
        callbacks: CallbackList | None = None,
        samples_per_epoch: float = math.inf,
        length: TrainingLength = NO_TRAINING,
        new_evaluator: Callable[[], Evaluator] = TokenLoss,
        go_back: GoBack | None = None,
        pruning: PruningInTraining | None = None,
    ) -> None:
        self.cfg, self.ctx, self.runner = cfg, ctx, runner
        self.schedule = schedule
        self.state = TrainState()
        self.length, self._new_evaluator = length, new_evaluator
        self._saver, self._go_back, self._pruning = saver, go_back, pruning
        options = cfg.Engine.spike
        self._guard: SpikeGuard | None = None
        if options.action != "off" and schedule is not None:
            self._guard = SpikeGuard(options, partial(any_rank, ctx))
        self._callbacks = callbacks or CallbackList()
        self._callback_error: UserError | None = None
        self._is_fitting = False
        self._watch = RankConsistency(cfg, ctx, samples_per_epoch, runner.count)
        self._saved_step = -1

    @property
    def max_steps(self) -> int:
        return self.length.max_steps

    @cached_property
    def utilization(self) -> Utilization | None:
        return run_utilization(self.cfg, self.ctx.device, device_name(self.ctx.device))

    def callback_states(self) -> dict[str, Any]:
        return self._callbacks.state()

    def fit(self, train_loader: Loader, eval_sets: EvalSets | None = None) -> None:
        """Train until ``max_steps`` optimizer steps are done, then save a checkpoint. SIGTERM, SIGHUP or
        Ctrl-C on any rank ends the run after the current step, and also saves a checkpoint.

        Raises:
            UserError: on all ranks, for example if the loss is not finite or a checkpoint cannot be saved.
        """
        self._saved_step, self._is_fitting, self._callback_error = self.state.step, True, None
        if self._guard is not None:
            self._guard.load_state(self.state.spikes)
            self.runner.judge = self._guard.judge
        was_done = self.state.step >= self.max_steps
        if self.state.step and not was_done:
            get_logger().info(f"training continues at global step {self.state.step + 1} of {self.max_steps}")
        try:
            with StopRequest() as stop, self._saver.completing():
                self._notify("on_fit_start")
                self._watch.check_at_rest(self.runner)
                if self.state.best_step == self.state.step:
                    self._saver.mark_best(self)  # an earlier process may have been killed just before this
                self._evaluate_if_missing(eval_sets or {}, stop)
                self._train(iter(train_loader), eval_sets or {}, stop)
                self._save_once()
                self.runner.finish_update()  # other ranks may still wait for messages from this rank
                raise_on_all_ranks(self.ctx, self._callback_error)
            if self._pruning is not None and self.state.step >= self.max_steps:
                self._pruning.finish()
            if stop and self.state.step < self.max_steps:
                get_logger().info(
                    f"stopped by {stop.signal_name or 'a signal to another rank'} after global step "
                    f"{self.state.step} of {self.max_steps}; "
                    "the same command with -o Engine.save_load.resume=auto continues"
                )
        finally:
            earlier = self._callback_error
            self._notify("on_fit_end")
            self._is_fitting = False
            if sys.exception() is not None and self._callback_error is not earlier:
                get_logger().error(str(self._callback_error))  # an earlier error is being raised instead
        raise_on_all_ranks(self.ctx, self._callback_error)
        if was_done:  # last, where users will see it
            done = f"{self.state.step} of {counted(self.max_steps, 'step')} are done"
            get_logger().warning(
                f"nothing to train: {done}. To continue, set more with --max-steps N; for a new run, set "
                "another Engine.save_load.output_dir"
            )

    def evaluate(self, eval_sets: EvalSets, stop: StopRequest | None = None) -> list[EvalRecord] | None:
        """Evaluate each evaluation set, then call the callbacks. Returns None if a signal stopped
        the evaluation. Raises UserError if a set has no token that counts in the loss."""
        records = []
        with PROGRESS.at(EVALUATING):
            for name, loader in eval_sets.items():
                record = self._evaluate_one(name, loader, stop)
                if record is None:
                    return None
                records.append(record)
        self.state.evaluated_step = self.state.step
        for record in records:
            self._notify("on_eval_end", record)
        return records

    def _evaluate_one(self, name: str | None, loader: Loader, stop: StopRequest | None) -> EvalRecord | None:
        started, evaluator, batches = time.perf_counter(), self._new_evaluator(), iter(loader)
        while True:
            PROGRESS.go_on()
            micro_batches, error = _next(batches)
            if self._watch.stops_evaluation(stop, error):
                return None
            if micro_batches is None:
                break
            evaluator.add(self.runner, micro_batches)
        found = evaluator.result()
        if found is None:
            key = "Data.Eval" if name is None else f"Data.Eval.sets.{name}"
            raise UserError(f"{key}: no token counts in the loss; is the evaluation split empty?")
        return EvalRecord(
            step=self.state.step,
            loss=found.loss,
            ppl=found.ppl,
            num_valid_tokens=found.count,
            seconds=time.perf_counter() - started,
            metrics=found.metrics,
            outputs=found.outputs,
            name=name,
        )

    def _evaluate_if_missing(self, eval_sets: EvalSets, stop: StopRequest) -> None:
        """Evaluate before the first step of this process if an evaluation is due at the current step and
        has not been done."""
        # At step 0, this finds a broken evaluation set early. Later, it completes an interrupted evaluation.
        due = self.length.eval_every and self.state.step % self.length.eval_every == 0
        if eval_sets and due and self.state.evaluated_step != self.state.step:
            self._evaluate_and_keep(eval_sets, stop)

    def _evaluate_and_keep(self, eval_sets: EvalSets, stop: StopRequest) -> None:
        """Evaluate all sets. With ``Engine.save_load.keep_best``, if the first set's result is the best so
        far, also save a checkpoint and mark it as the best. A result at step 0, or one that is not finite,
        never counts as the best."""
        records = self.evaluate(eval_sets, stop)
        judged_by = self.cfg.Engine.save_load.keep_best
        if records is None or judged_by is None or self.state.step == 0:
            return
        record = records[0]
        value = -record.loss if judged_by == "loss" else fmean(record.metrics.values())
        if not math.isfinite(value):
            return
        if self.state.best is None or value > self.state.best:
            before = self.state.best, self.state.best_step
            self.state.best, self.state.best_step = value, self.state.step
            self._save_once()
            if not self._saver.mark_best(self):
                self.state.best, self.state.best_step = before

    def _train(self, batches: Iterator[Sequence[MicroBatch]], eval_sets: EvalSets, stop: StopRequest) -> None:
        while self.state.step < self.max_steps:
            self._saver.poll()
            started, waited = time.perf_counter(), RECORD.waited
            PROGRESS.beat(READING, self.state.step + 1)
            micro_batches, error = self._read(batches)
            reader_cost = time.perf_counter() - started
            PROGRESS.beat(STEPPING)
            if self._watch.before_step(micro_batches, error, stop, self.state.step):
                return
            self._report_stragglers()
            moved = self._step(micro_batches, started, reader_cost)
            if moved is not None:
                batches = moved
                continue
            took = time.perf_counter() - started
            self._watch.pace_of_ranks.took(took, reader_cost, RECORD.waited - waited)
            if eval_sets and _is_due(self.state.step, self.length.eval_every):
                self._evaluate_and_keep(eval_sets, stop)
            if _is_due(self.state.step, self.length.save_every):
                self._save_once()

    def _report_stragglers(self) -> None:
        found = self._watch.pace_of_ranks.found
        if found is not None:
            if self.ctx.is_main:
                get_logger().warning(str(found))
            self._notify("on_stragglers", found)

    def _read(
        self, batches: Iterator[Sequence[MicroBatch]]
    ) -> tuple[Sequence[MicroBatch] | None, UserError | None]:
        """Read the next training batch. Returns (micro batches, None), or (None, error) if there is no batch
        or a callback has failed."""
        if self._callback_error is not None:
            return None, self._callback_error
        micro_batches, error = _next(batches)
        if micro_batches is None:
            return None, error or TrainingStoppedError(
                f"the training data ended at global step {self.state.step} of {self.max_steps}"
            )
        if self.cfg.batch.lengths is not None:
            micro_batches = shortened(micro_batches, self._seq_len)
        return micro_batches, None

    @property
    def _seq_len(self) -> int:
        lengths = self.cfg.batch.lengths
        if lengths is None:
            return self.cfg.Data.Train.dataset.max_seq_len
        return lengths.size_at(self.state.consumed_samples)

    def _step(
        self, micro_batches: Sequence[MicroBatch], started: float, reader_cost: float
    ) -> Iterator[Sequence[MicroBatch]] | None:
        """Run one optimizer step on a batch. ``started`` is the value of ``time.perf_counter`` when the
        batch was requested. If the run went back to a checkpoint, returns the batches to continue with,
        else None."""
        if self._pruning is not None:
            self._pruning.before_step(self.state.step)
        step, batch_size = self.state.step + 1, self.cfg.batch.size_at(self.state.consumed_samples)
        if self._guard is not None:
            self._guard.expect(step)
        scheduled = self.schedule.position(
            steps=self.state.schedule_step + 1, samples=self.state.schedule_samples + batch_size
        )
        lr, weight_decay = self.schedule.lr(scheduled), self.schedule.weight_decay(scheduled)
        try:
            output = self.runner.train_step(
                micro_batches,
                step=step,
                lr=lr,
                weight_decay=weight_decay,
                counts=self._watch.counts,
            )
        except NonFiniteError as error:
            text = self._watch.describe(error, self.runner, micro_batches, step)
            raise TrainingStoppedError(text) from error
        self._watch.after_step(self.runner)
        if self._guard is not None and self._guard.found is not None:
            moved = self._respond_to_spike(self._guard.found)
            if moved is not None:
                return moved
        epoch, batch = self._position()
        num_tokens = batch_size * self._seq_len
        self.state.step = step
        self.state.skipped_steps += output.skipped
        self.state.skipped_samples += batch_size if output.skipped else 0
        self.state.consumed_samples += batch_size
        self.state.epoch = self._position()[0]
        done = time.perf_counter()
        record = StepRecord(
            step=step,
            epoch=epoch,
            batch=batch,
            loss=output.loss,
            lr=lr,
            weight_decay=weight_decay,
            grad_norm=output.grad_norm,
            num_valid_tokens=output.num_valid_tokens,
            num_tokens=num_tokens,
            batch_size=batch_size,
            data_size=self.ctx.data_size,
            reader_cost=reader_cost,
            batch_cost=done - started,
            loss_scale=output.loss_scale,
            skipped=output.skipped,
            metrics=output.metrics,
            pruned=None if self._pruning is None else self._pruning.zero_share,
        )
        PROGRESS.beat(RESTING)
        PROGRESS.is_past_start = True
        self._notify("on_step_end", record)
        return None

    def _respond_to_spike(self, spike: Spike) -> Iterator[Sequence[MicroBatch]] | None:
        """Respond to a loss spike as configured: skip the step, go back to a checkpoint, or raise
        TrainingStoppedError. A spike that vanished when the step was repeated is only reported. If the run
        went back to a checkpoint, returns the batches to continue with, else None."""
        begin = self.state.consumed_samples
        end, moved = begin + self.cfg.batch.size_at(begin), None
        if spike.action == "rewind" and self._go_back is not None and not self._guard.gives_up:
            self._saver.complete()
            moved = self._go_back(self, end)
            if moved is not None:
                self._saved_step = self.state.step
                self._guard.load_state(self.state.spikes)
        samples = begin - self.state.data_start, end - self.state.data_start
        spike = spike.answered(self.state.step if moved is not None else None, samples)
        gives_up = self._guard.stop_reason(spike)
        if gives_up:
            spike = replace(spike, action="stop")
        self._notify("on_spike", spike)
        if spike.action == "stop":
            raise TrainingStoppedError(f"{spike}{gives_up}")
        get_logger().warning(str(spike))
        return moved

    def _position(self) -> tuple[int, int]:
        return self.length.position(self.state.data_position / self.cfg.batch.global_batch_size)

    def _save_once(self) -> None:
        if self.state.step != self._saved_step:
            self._watch.check_at_rest(self.runner)
            if self._guard is not None:
                self.state.spikes = self._guard.state()
            self._saver.save(self)
            self._saved_step = self.state.step

    def _notify(self, hook: str, *args: object) -> None:
        """Call the method ``hook`` of every callback, even if one raises a UserError. Then raise the first
        UserError or, during :meth:`fit`, keep it until all ranks can raise it together."""
        found: UserError | None = None
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(self, *args)
            except UserError as error:
                found = found or error
        if self._is_fitting:
            self._callback_error = self._callback_error or found
        elif found is not None:
            raise found


def _next(
    batches: Iterator[Sequence[MicroBatch]],
) -> tuple[Sequence[MicroBatch] | None, UserError | None]:
    """Read the next batch. Returns (micro batches, None), (None, None) at the end of the data, or (None,
    error) if the batch cannot be read. The error is not raised here, so that all ranks can stop together."""
    try:
        return next(batches, None), None
    except UserError as error:
        return None, error


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
