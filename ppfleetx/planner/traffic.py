"""Bytes that a rank sends in one optimizer step, by parallel axis.

n ranks, ring algorithms (Thakur et al. 2005): an all-reduce of S bytes makes a rank send 2 (n - 1) / n S, an
all-gather, reduce-scatter or all-to-all of S bytes (n - 1) / n S; a broadcast from an owner and a reduction
into one count the same, as the mean over the ranks. The few scalars of a step (loss, token count, norm) are
left out.
"""

from __future__ import annotations

from ppfleetx.planner.case import Case
from ppfleetx.planner.parameters import held_parameters

_TOKEN_SUMS = 3
"""Numbers of 4 bytes a token that tensor ranks sum for the loss: maximum, sum of powers, own logit."""


def sent_bytes(case: Case, stage: int) -> dict[str, float]:
    """Bytes that a rank of pipeline stage ``stage`` sends, by axis.

    ``dp x sep`` is the one group of replicas and parts of the sequence together; ``tied`` are the two ends
    of the pipeline, which share the word embedding. Axes of degree 1 are left out.
    """
    plan = case.plan
    sent: dict[str, float] = {}
    if plan.mp > 1:
        sent["mp"] = _tensor_parallel(case, stage)
    if plan.sep > 1:
        sent["sep"] = _exchanges(case, stage)
    if plan.pp > 1:
        sent["pp"] = _messages(case, stage)
        if ties_ends(case) and stage in (0, plan.pp - 1):
            sent["tied"] = _all_reduce(2, _word_table(case) * case.precision.gradient_bytes / plan.sharding)
    if plan.sharding > 1:
        sent["sharding"] = _sharding(case, stage)
    if plan.dp * plan.sep > 1:
        axis = "dp x sep" if plan.dp > 1 and plan.sep > 1 else "dp" if plan.dp > 1 else "sep"
        held = held_parameters(case, stage)
        gradients = held.trained / plan.sharding * case.precision.gradient_bytes
        sent[axis] = sent.get(axis, 0.0) + _all_reduce(plan.dp * plan.sep, gradients)
    return sent


def ties_ends(case: Case) -> bool:
    """Whether the first and the last pipeline stage have copies of the word embedding."""
    return case.spec.head.is_tied


def _all_reduce(n: int, size: float) -> float:
    return 2 * (n - 1) / n * size


def _half(n: int, size: float) -> float:
    return (n - 1) / n * size


def _word_table(case: Case) -> float:
    return case.model.padded_vocab_size * case.model.hidden_size / case.plan.mp


def _tensor_parallel(case: Case, stage: int) -> float:
    """Per layer two sums of the activation forward and two backward, one for the vocabulary-parallel
    embedding, one for the head's input gradient; what is recomputed sums again. With sequence parallelism
    each sum is its two halves, and an embedding that is summed whole and cut has its gradient gathered. Once
    a step the copies of what every rank holds whole are made equal, and gradients that are partial are
    summed."""
    plan, n, held = case.plan, case.plan.mp, held_parameters(case, stage)
    again = {"none": 0, "core_attn": 0, "full_attn": 1, "full": 2}
    sums = sum((4 + again[kind]) * count for (_, kind), count in case.layer_kinds(stage).items())
    volume = sums * _all_reduce(n, case.trunk_bytes)
    tokens = case.micro_batch * case.seq_len / plan.sep
    if stage == 0:
        volume += _all_reduce(n, case.trunk_bytes) + _half(n, case.trunk_bytes) * plan.sequence_parallel
    if stage == plan.pp - 1:
        volume += _all_reduce(n, case.trunk_bytes) + _TOKEN_SUMS * _all_reduce(n, 4 * tokens)
    volume *= case.accumulate
    if plan.pp > 1 and case.message_parts > 1:
        volume += _gathers(case, stage)
    owned = 1 / plan.sharding
    each = case.precision.gradient_bytes
    volume += _all_reduce(n, held.whole * owned * each)
    if plan.sequence_parallel:
        volume += _all_reduce(n, held.partial * owned * each)
    return volume


def _gathers(case: Case, stage: int) -> float:
    """Pipeline messages are sent in parts by tensor ranks that hold the same; the receivers gather them."""
    n = case.plan.mp
    forward, backward = _neighbours(case, stage)
    # As many come as go: activations from where gradients go to.
    size = (forward + backward) * case.trunk_bytes + backward * _passenger(case)
    return case.accumulate * _half(n, size)


def _exchanges(case: Case, stage: int) -> float:
    """Heads for positions before attention (queries, keys, values), back after it, and both again
    backward."""
    rounds = {"none": 2, "core_attn": 2, "full_attn": 3, "full": 3}
    size = sum(
        rounds[kind] * count * sum(block.attention.exchanged_bytes(case.work))
        for (block, kind), count in case.layer_kinds(stage).items()
    )
    return case.accumulate * _half(case.plan.sep, size)


def _neighbours(case: Case, stage: int) -> tuple[int, int]:
    """(chunks here that are followed by one elsewhere, chunks that follow one)."""
    last = case.plan.num_chunks - 1
    mine = range(stage, last + 1, case.plan.pp)
    return sum(chunk < last for chunk in mine), sum(chunk > 0 for chunk in mine)


def _passenger(case: Case) -> float:
    """Position ids of whole sequences, which travel with the activation where blocks turn by them."""
    return 8 * case.micro_batch * case.seq_len * case.model.positions.rotates


def _messages(case: Case, stage: int) -> float:
    """Activations to the next chunk, their gradients to the previous one."""
    forward, backward = _neighbours(case, stage)
    size = (forward + backward) * case.message_bytes
    ids = forward * _passenger(case) / case.message_parts
    return case.accumulate * (size + ids)


def _sharding(case: Case, stage: int) -> float:
    """Gradients to their owners, new values from them; stage 3 sends values before each pass instead, a tied
    embedding at both its places. From stage 2 on gradients also leave during the passes, when a bucket is
    full."""
    plan, held, n = case.plan, held_parameters(case, stage), case.plan.sharding
    gradients = _half(n, held.trained * case.precision.gradient_bytes)
    if plan.sharding_stage < 3:
        return gradients + _half(n, held.trained * case.precision.parameter_bytes)
    twice = _word_table(case) if plan.pp == 1 and ties_ends(case) else 0.0
    return gradients + 2 * case.accumulate * _half(n, (held.values + twice) * case.precision.parameter_bytes)
