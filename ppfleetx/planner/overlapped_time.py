"""How much of the communication a rank waits for, where it travels while the passes compute.

The seconds of what ``parallel/overlap.py``, ``param_broadcast.py`` and ``zero3.py`` do. Links and cards are
assumed not to slow each other down, which has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppfleetx.planner.case import Case
from ppfleetx.planner.parameters import Held, embedding_bytes


@dataclass(frozen=True)
class PassSeconds:
    """Of one micro batch through all chunks of a rank."""

    forward: float
    backward: float


def waited_for_gradients(case: Case, stage: int, held: Held, one_sum: float, passes: PassSeconds) -> float:
    """Seconds of the sums of gradients that nothing hides.

    Args:
        one_sum: seconds of all gradients on their way once, after nothing else.
    """
    rounds = case.accumulate if _leaves_in_every_pass(case) else 1
    bucket, whole = case.overlap.bucket_bytes, held.trained * case.precision.gradient_bytes
    if bucket is None or not whole:
        return rounds * one_sum
    if _leaves_in_every_pass(case):
        # A bucket of each owner fills up; what is in them leaves when the step ends.
        last = min(1.0, case.plan.sharding * bucket / 2 / whole)
        between = max(0.0, one_sum - passes.forward - passes.backward)
        return (rounds - 1) * between + max(one_sum - passes.backward, one_sum * last)
    # Nothing leaves before the first bucket is complete; the last one when the pass has ended.
    first = min(1.0, bucket / 2 / whole)
    last = min(1.0, max(bucket / 2, embedding_bytes(case, stage)) / whole)
    return max(one_sum - passes.backward * (1 - first), one_sum * last)


def waited_for_values(case: Case, stage: int, held: Held, sending: float, passes: PassSeconds) -> float:
    """Seconds of the new values' way (sharding stages 1 and 2) that the next forward pass does not hide."""
    whole = held.trained * case.precision.gradient_bytes
    if not case.overlap.values or not whole:
        return sending
    return max(sending - passes.forward, sending * min(1.0, embedding_bytes(case, stage) / whole))


def waited_for_layer(case: Case, fetching: float, computing: float) -> float:
    """Seconds that a layer waits for its values (stage 3), which come while the layer before it computes."""
    return max(0.0, fetching - computing) if case.overlap.values else fetching


def _leaves_in_every_pass(case: Case) -> bool:
    return case.plan.sharding > 1 and case.plan.sharding_stage > 1
