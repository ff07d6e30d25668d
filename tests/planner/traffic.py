"""Bytes that a rank sends in one optimizer step, by parallel axis.

n ranks, ring algorithms (Thakur et al. 2005): an all-reduce of S bytes makes a rank send 2 (n - 1) / n S, an
all-gather, reduce-scatter or all-to-all of S bytes (n - 1) / n S; a broadcast from an owner and a reduction
into one count the same, as the mean over the ranks. The few scalars of a step (loss, token count, norm) are
left out.
"""

from __future__ import annotations

from ppfleetx.planner.job import Job
from ppfleetx.planner.parameters import held_parameters

_TOKEN_SUMS = 3
"""Numbers of 4 bytes a token that tensor ranks sum for the loss: maximum, sum of powers, own logit."""


def sent_bytes(job: Job, stage: int) -> dict[str, float]:
    """Bytes that a rank of pipeline stage ``stage`` sends, by axis.

    ``dp x sep`` is the one group of replicas and parts of the sequence together; ``tied`` are the two ends
    of the pipeline, which share the word embedding. Axes of degree 1 are left out.
    """
    plan = job.plan
    sent: dict[str, float] = {}
    if plan.mp > 1:
        sent["mp"] = _tensor_parallel(job, stage)
    if plan.sep > 1:
        sent["sep"] = _exchanges(job, stage)
    if plan.pp > 1:
        sent["pp"] = _messages(job, stage)
        if ties_ends(job) and stage in (0, plan.pp - 1):
            sent["tied"] = _all_reduce(2, _word_table(job) * job.precision.gradient_bytes / plan.sharding)
    if plan.sharding > 1:
        sent["sharding"] = _sharding(job, stage)
    if plan.dp * plan.sep > 1:
        axis = "dp x sep" if plan.dp > 1 and plan.sep > 1 else "dp" if plan.dp > 1 else "sep"
        held = held_parameters(job, stage)
        gradients = held.trained / plan.sharding * job.precision.gradient_bytes
        sent[axis] = sent.get(axis, 0.0) + _all_reduce(plan.dp * plan.sep, gradients)
    return sent


def ties_ends(job: Job) -> bool:
    """Whether the first and the last pipeline stage have copies of the word embedding."""
    return job.spec.head.is_tied


def _all_reduce(n: int, size: float) -> float:
    return 2 * (n - 1) / n * size


def _half(n: int, size: float) -> float:
    return (n - 1) / n * size


def _word_table(job: Job) -> float:
    return job.model.padded_vocab_size * job.model.hidden_size / job.plan.mp


def _tensor_parallel(job: Job, stage: int) -> float:
    """Per layer two sums of the activation forward and two backward, one for the vocabulary-parallel
    embedding, one for the head's input gradient; what is recomputed sums again. With sequence parallelism
    each sum is its two halves, and an embedding that is summed whole and cut has its gradient gathered. Once
    a step the copies of what every rank holds whole are made equal, and gradients that are partial are
    summed."""
    plan, n, held = job.plan, job.plan.mp, held_parameters(job, stage)
    again = {"none": 0, "core_attn": 0, "full_attn": 1, "full": 2}
    sums = sum((4 + again[kind]) * count for (_, kind), count in job.layer_kinds(stage).items())
    volume = sums * _all_reduce(n, job.hidden_bytes)
    tokens = job.micro_batch * job.seq_len / plan.sep
    if stage == 0:
        volume += _all_reduce(n, job.hidden_bytes) + _half(n, job.hidden_bytes) * plan.sequence_parallel
    if stage == plan.pp - 1:
        volume += _all_reduce(n, job.hidden_bytes) + _TOKEN_SUMS * _all_reduce(n, 4 * tokens)
    volume *= job.accumulate
    if plan.pp > 1 and job.message_parts > 1:
        volume += _gathers(job, stage)
    owned = 1 / plan.sharding
    each = job.precision.gradient_bytes
    volume += _all_reduce(n, held.whole * owned * each)
    if plan.sequence_parallel:
        volume += _all_reduce(n, held.partial * owned * each)
    return volume


def _gathers(job: Job, stage: int) -> float:
    """Pipeline messages are sent in parts by tensor ranks that hold the same; the receivers gather them."""
    n = job.plan.mp
    forward, backward = _neighbours(job, stage)
    # As many come as go: activations from where gradients go to.
    size = (forward + backward) * job.hidden_bytes + backward * _passenger(job)
    return job.accumulate * _half(n, size)


def _exchanges(job: Job, stage: int) -> float:
    """Heads for positions before attention (queries, keys, values), back after it, and both again
    backward."""
    rounds = {"none": 2, "core_attn": 2, "full_attn": 3, "full": 3}
    size = sum(
        rounds[kind] * count * sum(block.attention.exchanged_bytes(job.work))
        for (block, kind), count in job.layer_kinds(stage).items()
    )
    return job.accumulate * _half(job.plan.sep, size)


def _neighbours(job: Job, stage: int) -> tuple[int, int]:
    """(chunks here that are followed by one elsewhere, chunks that follow one)."""
    last = job.plan.num_chunks - 1
    mine = range(stage, last + 1, job.plan.pp)
    return sum(chunk < last for chunk in mine), sum(chunk > 0 for chunk in mine)


def _passenger(job: Job) -> float:
    """Position ids of whole sequences, which travel with the activation where blocks turn by them."""
    return 8 * job.micro_batch * job.seq_len * job.model.positions.rotates


def _messages(job: Job, stage: int) -> float:
    """Activations to the next chunk, their gradients to the previous one."""
    forward, backward = _neighbours(job, stage)
    size = (forward + backward) * job.message_bytes
    ids = forward * _passenger(job) / job.message_parts
    return job.accumulate * (size + ids)


def _sharding(job: Job, stage: int) -> float:
    """Gradients to their owners, new values from them; stage 3 sends values before each pass instead, a tied
    embedding at both its places. From stage 2 on gradients also leave during the passes, when a bucket is
    full."""
    plan, held, n = job.plan, held_parameters(job, stage), job.plan.sharding
    gradients = _half(n, held.trained * job.precision.gradient_bytes)
    if plan.sharding_stage < 3:
        return gradients + _half(n, held.trained * job.precision.parameter_bytes)
    twice = _word_table(job) if plan.pp == 1 and ties_ends(job) else 0.0
    return gradients + 2 * job.accumulate * _half(n, (held.used + twice) * job.precision.parameter_bytes)
