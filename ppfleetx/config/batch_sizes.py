"""Derive the batch sizes that a configuration leaves out.

Sizes count sequences: global = local x dp x sharding, and local = micro x accumulate_steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppfleetx.config.errors import RuleError
from ppfleetx.config.message_text import counted

_GLOBAL = "Global.global_batch_size"
_LOCAL = "Global.local_batch_size"
_MICRO = "Global.micro_batch_size"
_STEPS = "Engine.accumulate_steps"
_RAMP = "Global.rampup_batch_size"


@dataclass(frozen=True)
class Ramp:
    """Stepwise growth of the batch size or the sequence length, like Megatron-LM's ``--rampup-batch-size``.

    Attributes:
        start: the first size.
        increment: how much the size grows in each step of the ramp.
        samples: the number of training sequences after which the size is ``full``.
        full: the final size.
    """

    start: int
    increment: int
    samples: int
    full: int

    @property
    def sizes(self) -> range:
        """The batch sizes or sequence lengths that training uses before it reaches ``full``, in ascending
        order."""
        return range(self.start, self.full, self.increment)

    @property
    def reaches_full(self) -> bool:
        """Whether ``start`` plus a whole number of increments is exactly ``full``."""
        return self.start < self.full and (self.full - self.start) % self.increment == 0

    def size_at(self, consumed: int) -> int:
        """The batch size or sequence length of the step that begins after ``consumed`` sequences."""
        if consumed >= self.samples:
            return self.full
        return self.start + self.increment * (consumed * len(self.sizes) // self.samples)


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes in sequences: for the whole job, for a data-parallel rank, and for a forward pass. With a
    ``ramp``, these are the final sizes.

    Attributes:
        accumulate_steps: the number of forward passes (micro batches) of a data-parallel rank in a step.
        ramp: how the global batch size grows; None if it is constant.
        lengths: how the sequence length grows, in tokens; None if it is constant.
    """

    global_batch_size: int
    local_batch_size: int
    micro_batch_size: int
    accumulate_steps: int
    ramp: Ramp | None = None
    lengths: Ramp | None = None

    def size_at(self, consumed: int) -> int:
        """The number of sequences in a step that begins after ``consumed`` sequences."""
        return self.global_batch_size if self.ramp is None else self.ramp.size_at(consumed)

    def consumed_after(self, steps: int, consumed: int = 0) -> int:
        """The number of sequences that a run has consumed in total after ``steps`` further steps.

        ``consumed`` is the number before these steps.
        """
        while steps > 0 and self.ramp is not None and consumed < self.ramp.samples:
            consumed += self.ramp.size_at(consumed)
            steps -= 1
        return consumed + steps * self.global_batch_size

    def steps_in(self, samples: int) -> int:
        """The number of whole steps that a run can take with ``samples`` sequences."""
        steps = consumed = 0
        while self.ramp is not None and consumed < self.ramp.samples:
            consumed += self.ramp.size_at(consumed)
            if consumed > samples:
                return steps
            steps += 1
        return steps + (samples - consumed) // self.global_batch_size


def resolve_batch(
    global_size: int | None,
    local_size: int | None,
    micro_size: int | None,
    accumulate_steps: int | None,
    *,
    data_size: int,
    ramp: tuple[int, int, int] | None = None,
) -> BatchPlan:
    """Derive all batch sizes, in sequences, from the ones that are set.

    Args:
        data_size: the number of data-parallel ranks, dp x sharding.
        ramp: start, increment and samples of a :class:`Ramp`; None: the batch size is constant.

    Raises:
        RuleError: the sizes contradict each other, are not divisible as they must be, or are all missing; or
            the ramp breaks a rule.
    """
    local = _local_size(global_size, local_size, micro_size, accumulate_steps, data_size)
    if micro_size is None:
        micro = _divide(local, accumulate_steps or 1, (_STEPS, _LOCAL), "accumulate_steps")
    else:
        micro = micro_size
    steps = _divide(local, micro, (_MICRO, _LOCAL), "micro_batch_size")
    if accumulate_steps is not None and accumulate_steps != steps:
        raise RuleError(
            (_STEPS, _LOCAL, _MICRO),
            f"contradicts the batch sizes: local_batch_size {local} / micro_batch_size {micro} = {steps}",
        )
    full = local * data_size
    grows = None if ramp is None else Ramp(*ramp, full)
    if grows is not None:
        _check_ramp(grows, micro * data_size)
    return BatchPlan(full, local, micro, steps, grows)


def _check_ramp(ramp: Ramp, per_pass: int) -> None:
    """Raise RuleError if ``ramp`` breaks a rule, like Megatron-LM: the full batch size must be reached in
    whole increments, and every batch size must be a multiple of ``per_pass``.

    ``per_pass`` is the number of sequences in one forward pass on all ranks.
    """
    if not ramp.reaches_full:
        raise RuleError(
            (_RAMP, _GLOBAL),
            f"cannot grow from {ramp.start} to the global batch of {ramp.full} by {ramp.increment} at a time",
        )
    wrong = next((size for size in ramp.sizes if size % per_pass), None)
    if wrong is not None:
        raise RuleError(
            (_RAMP, _MICRO),
            f"has a batch of {wrong}, which is not a multiple of micro_batch_size x data ranks = {per_pass}",
        )


def _local_size(
    global_size: int | None, local_size: int | None, micro: int | None, steps: int | None, data_size: int
) -> int:
    ranks = f"dp_degree x sharding_degree = {counted(data_size, 'data rank')}"
    if global_size is not None and local_size is not None:
        if global_size != local_size * data_size:
            raise RuleError(
                (_GLOBAL, _LOCAL),
                f"must be local_batch_size {local_size} x {ranks} = {local_size * data_size}; to give the "
                f"global size alone, set {_LOCAL} to null",
            )
        return local_size
    if local_size is not None:
        return local_size
    if global_size is not None:
        if global_size % data_size:
            near = max(data_size, round(global_size / data_size) * data_size)
            raise RuleError(
                (_GLOBAL,),
                f"{counted(global_size, 'sequence')} cannot be shared evenly by {ranks}; "
                f"the nearest that can is {near}",
            )
        return global_size // data_size
    if micro is not None:
        return micro * (steps or 1)
    raise RuleError(
        (_GLOBAL, _LOCAL, _MICRO),
        "no batch size is given; give Global.global_batch_size or Global.local_batch_size",
    )


def _divide(local: int, part: int, keys: tuple[str, ...], part_name: str) -> int:
    if local % part:
        raise RuleError(keys, f"local_batch_size {local} does not divide by {part_name} {part}")
    return local // part
