"""The pipeline's schedule, played through: who computes what when.

1F1B (Narayanan et al. 2021, PipeDream-Flush) and its interleaved form (the same, §2.2): the orders that
Paddle's schedules follow; and ZB-H1 (Qi et al. 2023), where gradients of weights come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppfleetx.config.schedules import zero_bubble_order

_STEADY_ROUNDS = 3
_WEIGHTS = -1


class Span(NamedTuple):
    """One forward or backward pass: of ``chunk`` (virtual stage) and ``micro`` (micro batch), in seconds.

    ``is_weights``: the half of a backward pass that only computes gradients of weights.
    """

    stage: int
    start: float
    end: float
    is_forward: bool
    chunk: int
    micro: int
    is_weights: bool = False


class Messages(NamedTuple):
    """Activations and their gradients on the way to a neighbouring chunk.

    The receiver waits until its message has come. A stage has one message under way in each direction.

    Attributes:
        seconds: of one message.
        output_waits, gradient_waits: the sender computes on only when it has gone.
    """

    seconds: float
    output_waits: bool = True
    gradient_waits: bool = True

    def keeps(self, *, output: bool) -> bool:
        """Whether the sender waits for it."""
        return self.output_waits if output else self.gradient_waits


@dataclass(frozen=True)
class Timeline:
    """Attributes: ``spans`` of all passes that were played, ``seconds`` of the whole step's passes."""

    spans: tuple[Span, ...]
    seconds: float


def play(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    micro_batches: int,
    messages: Messages,
    *,
    whole: bool = False,
    forwards_first: bool = False,
    weights: Sequence[float] | None = None,
) -> Timeline:
    """Play one step's passes.

    Args:
        forward, backward: seconds of a micro batch's passes, ``[stage][virtual stage]``.
        micro_batches: number of micro batches.
        messages: what neighbouring chunks send each other.
        forwards_first: an interleaved schedule begins with all forward passes.
        weights: seconds of each stage's gradients of weights, a part of ``backward``, which run in the order
            of ZB-H1; None: backward passes are not divided.
        whole: play every micro batch. Otherwise a long step is cut: once the pipeline is in its rhythm,
            the remaining micro batches repeat it.
    """
    num_stages, num_chunks = len(forward), len(forward[0])
    shown = num_stages * (_STEADY_ROUNDS + num_chunks - 1)
    if whole or forwards_first or micro_batches <= shown + num_stages:
        return _play(forward, backward, micro_batches, messages, forwards_first, weights)
    extra = (micro_batches - shown) % num_stages
    some = _play(forward, backward, shown + extra, messages, weights=weights)
    more = _play(forward, backward, shown + extra + num_stages, messages, weights=weights)
    rounds = (micro_batches - shown - extra) // num_stages
    return Timeline(more.spans, some.seconds + rounds * (more.seconds - some.seconds))


def _play(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    micro_batches: int,
    messages: Messages,
    forwards_first: bool = False,
    weights: Sequence[float] | None = None,
) -> Timeline:
    num_stages, num_chunks = len(forward), len(forward[0])
    if weights is None:
        orders = [
            _order(stage, num_stages, num_chunks, micro_batches, forwards_first)
            for stage in range(num_stages)
        ]
    else:
        assert num_chunks == 1, "ZB-H1 is of whole stages"
        orders = [_divided_order(stage, num_stages, micro_batches) for stage in range(num_stages)]
        backward = [[row[0] - later] for row, later in zip(backward, weights, strict=True)]
    positions, clock = [0] * num_stages, [0.0] * num_stages
    arrived: dict[
        tuple[bool, int, int], float
    ] = {}  # when the input of (is_forward, global chunk, micro) is there
    gone = [[0.0, 0.0] for _ in range(num_stages)]  # when the last gradient and output have left
    spans: list[Span] = []
    last = num_stages * num_chunks - 1
    waiting = list(range(num_stages))
    while waiting:
        stage = waiting.pop()
        while positions[stage] < len(orders[stage]):
            is_forward, chunk, micro = orders[stage][positions[stage]]
            if chunk == _WEIGHTS:
                start, clock[stage] = clock[stage], clock[stage] + weights[stage]
                spans.append(Span(stage, start, clock[stage], False, 0, micro, is_weights=True))
                positions[stage] += 1
                continue
            place = chunk * num_stages + stage
            needed = (is_forward, place, micro)
            starts_alone = is_forward and place == 0
            if not starts_alone and needed not in arrived:
                break
            start = clock[stage] if starts_alone else max(clock[stage], arrived[needed])
            end = start + (forward if is_forward else backward)[stage][chunk]
            spans.append(Span(stage, start, end, is_forward, chunk, micro))
            if is_forward and place == last:
                arrived[(False, place, micro)] = end
            elif is_forward or place > 0:
                following = place + 1 if is_forward else place - 1
                comes = max(end, gone[stage][is_forward]) + messages.seconds
                gone[stage][is_forward] = arrived[(is_forward, following, micro)] = comes
                end = comes if messages.keeps(output=is_forward) else end
                if following % num_stages != stage:
                    waiting.append(following % num_stages)
            clock[stage] = end
            positions[stage] += 1
    assert all(p == len(o) for p, o in zip(positions, orders, strict=True)), "the schedule is stuck"
    return Timeline(tuple(spans), max(clock))


def _divided_order(stage: int, num_stages: int, micro_batches: int) -> list[tuple[bool, int, int]]:
    """:func:`_order` in ZB-H1; gradients of weights are of no virtual stage."""
    order = zero_bubble_order(stage, num_stages, micro_batches)
    return [(part == "F", _WEIGHTS if part == "W" else 0, micro) for part, micro in order]


def _order(
    stage: int, num_stages: int, num_chunks: int, micro_batches: int, forwards_first: bool
) -> list[tuple[bool, int, int]]:
    """(is forward, virtual stage, micro batch) in the order in which ``stage`` runs them."""
    total = micro_batches * num_chunks
    if num_chunks == 1:
        ahead = min(num_stages - 1 - stage, total)
    else:
        ahead = min((num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages, total)
    if forwards_first:
        ahead = total
    forwards = [(True, *_place(k, num_stages, num_chunks, backwards=False)) for k in range(total)]
    backwards = [(False, *_place(k, num_stages, num_chunks, backwards=True)) for k in range(total)]
    order = forwards[:ahead]
    for k in range(total - ahead):
        order += (forwards[ahead + k], backwards[k])
    return order + backwards[total - ahead :]


def _place(k: int, num_stages: int, num_chunks: int, *, backwards: bool) -> tuple[int, int]:
    """(virtual stage, micro batch) of the k-th pass: groups of ``num_stages`` micro batches go round."""
    if num_chunks == 1:
        return 0, k
    group, within = divmod(k, num_stages * num_chunks)
    chunk, micro = divmod(within, num_stages)
    return (num_chunks - 1 - chunk if backwards else chunk), group * num_stages + micro


def bubble_share(
    timeline: Timeline,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    micro_batches: int,
) -> float:
    """Share of the passes' time in which the stages are idle on average, messages counted as idle."""
    busy = sum(sum(f) + sum(b) for f, b in zip(forward, backward, strict=True)) * micro_batches / len(forward)
    return 1 - busy / timeline.seconds
