"""Keep the ranks of a job consistent: exchange stop signals, errors and token counts before each step, and
run the checks of ``Engine.checks``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ppfleetx.config.errors import UserError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.yaml_dump import flat_values
from ppfleetx.data.dataloader import MicroBatch
from ppfleetx.distributed.consistency_checks import (
    batch_digest,
    check_batches,
    check_replicas,
    check_same_configuration,
    check_samples,
    first_place,
)
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather, gather_numbers, raise_on_all_ranks
from ppfleetx.distributed.device import is_card
from ppfleetx.nn.cpu_ops import bfloat16, ops
from ppfleetx.nn.cpu_ops.compiled import NOT_COMPILED
from ppfleetx.resilience.stragglers import StragglerTable

if TYPE_CHECKING:
    from ppfleetx.parallel.step_runner import NonFiniteError, StepRunner
    from ppfleetx.resilience.stop_request import StopRequest


class RankConsistency:
    """Makes all ranks stop after the same step and fail with the same message, and runs the checks of
    ``Engine.checks``.

    Attributes:
        counts: the results of ``StepRunner.count`` for the current step, summed over the data-parallel ranks.
    """

    def __init__(
        self,
        cfg: RunConfig,
        ctx: ParallelContext,
        samples_per_epoch: float,
        count: Callable[[Sequence[MicroBatch]], Sequence[float]],
    ) -> None:
        self._count = count
        self._ctx, self._level = ctx, cfg.Engine.checks if ctx.world_size > 1 else "off"
        self.pace_of_ranks = StragglerTable(
            cfg.Engine.straggler_freq,
            [ctx.plan.coordinates(rank)["pp"] for rank in range(ctx.world_size)],
            partial(gather, ctx),
        )
        self.counts: Sequence[float] | None = None
        train = cfg.Data.Train
        self._distinct = samples_per_epoch >= cfg.batch.global_batch_size and not (
            train is not None and train.shuffles_for_training
        )

    def before_step(
        self,
        micro_batches: Sequence[MicroBatch] | None,
        error: UserError | None,
        stop: StopRequest,
        step: int,
    ) -> bool:
        """Exchange stop signals, errors and token counts between all ranks. Returns whether to stop before
        the next step. ``error`` is an error of this rank, such as one from reading the batch; ``step`` is
        the number of steps done. Raises UserError on all ranks if any rank has an ``error``, or if the
        batches are inconsistent."""
        digest = batch_digest(micro_batches or ()) if self._level != "off" else 0
        counts = np.array(self._count(micro_batches or ()), np.float64).view(np.int64)  # as int64 bits
        numbers = [stop.signal_name is not None, error is not None, digest, *counts, *self.pace_of_ranks.own]
        of_all = gather_numbers(self._ctx, numbers)
        if of_all[:, 1].any():
            raise_on_all_ranks(self._ctx, error)
        of_ranks = np.ascontiguousarray(of_all[:, 3 : 3 + len(counts)].T).view(np.float64)
        self.counts = [self._ctx.sum_of_data_ranks(values) for values in of_ranks.tolist()]
        self.pace_of_ranks.add(of_all[:, 3 + len(counts) :], step)
        if stop.agree(of_all[:, 0].any()):
            return True
        if self._level != "off":
            check_batches(self._ctx, of_all[:, 2].tolist(), distinct=self._distinct)
        if self._level == "full" and self._distinct:
            check_samples(self._ctx, _sample_ids(micro_batches or ()))
        return False

    def stops_evaluation(self, stop: StopRequest | None, error: UserError | None) -> bool:
        """Return whether any rank has received a stop signal. All ranks must call this before each batch of
        an evaluation. Raises UserError on all ranks if any rank has an ``error``."""
        requested = stop is not None and stop.signal_name is not None
        of_all = gather_numbers(self._ctx, [requested, error is not None])
        if of_all[:, 1].any():
            raise_on_all_ranks(self._ctx, error)
        return stop is not None and stop.agree(of_all[:, 0].any())

    def after_step(self, runner: StepRunner) -> None:
        if self._level == "full":
            check_replicas(self._ctx, _held(runner, states=True))

    def check_at_rest(self, runner: StepRunner) -> None:
        """Raise CheckFailedError if the copies of a weight on different ranks differ. All ranks must call
        this between two steps. Does nothing if ``Engine.checks`` is off."""
        if self._level != "off":
            check_replicas(self._ctx, _held(runner, states=False))

    def describe(
        self, error: NonFiniteError, runner: StepRunner, micro_batches: Sequence[MicroBatch], step: int
    ) -> str:
        """Return an error message that says on which rank, in which layer and in which samples a non-finite
        number first appeared. All ranks must call this."""
        found = first_place(self._ctx, runner.locate_non_finite(micro_batches, step=step))
        text = f"global step {step}: {error.what} is {error.value}; nothing was updated."
        rank, samples = 0, error.sample_ids
        if found is None:
            text += (
                " Repeating the passes gives only finite outputs and gradients: either the squares of the "
                "gradients overflow, or the hardware is at fault (memory, a device)."
            )
        else:
            rank, place = found
            where = f" on rank {rank}" if self._ctx.world_size > 1 else ""
            if place.micro_batch is not None:
                where += f" in micro batch {place.micro_batch}"
            text += f" It began{where} with {place}."
            if self._ctx.rank == rank and place.micro_batch is not None:
                samples = _sample_ids(micro_batches[place.micro_batch : place.micro_batch + 1])
        samples = gather(self._ctx, samples)[rank]
        data_rank = self._ctx.plan.data_rank(rank)
        return (
            f"{text} Samples of this {'step' if found is None else 'micro batch'} on data rank {data_rank}, "
            f"as positions in the training order: {samples}"
        )


def check_configuration(cfg: RunConfig, ctx: ParallelContext) -> None:
    """Raise CheckFailedError unless all ranks have the same configuration, including device and directories,
    and the same CPU operators. Does nothing if ``Engine.checks`` is off.
    """
    if cfg.Engine.checks != "off" and ctx.world_size > 1:
        values = dict(flat_values(cfg.model_dump(mode="json")))
        check_same_configuration(ctx, values | ({} if is_card(ctx.device) else _operators(cfg)))


def _operators(cfg: RunConfig) -> dict[str, str]:
    """Return the state on this rank of the CPU operators that affect losses, such as
    ``{"CPU operators": "compiled"}``. If the run can compute in bfloat16, a second entry says whether this
    CPU can, or why not."""
    found = {"CPU operators": "compiled" if ops.are_available() else NOT_COMPILED}
    precision = cfg.Engine.mix_precision
    if precision.enable or cfg.Optimizer.muon.newton_schulz_dtype == "auto":
        found["bfloat16 on the CPU"] = bfloat16.obstacle("bfloat16") or "compiled"
    return found


def _held(runner: StepRunner, *, states: bool) -> Iterator[tuple[str, Any, Any]]:
    parameters = dict(runner.named_parameters())
    for name, parameter in parameters.items():
        yield name, parameter, parameter.info
    if states:
        for (name, state), tensor in runner.optimizer_state().items():
            yield f"{name}/{state}", tensor, parameters[name].info


def _sample_ids(micro_batches: Sequence[MicroBatch]) -> list[int]:
    return [int(i) for batch in micro_batches for i in batch.get("sample_ids", ())]
