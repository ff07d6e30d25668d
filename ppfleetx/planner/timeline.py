"""Simulate a pipeline schedule: the times at which each pipeline stage computes its passes.

The schedules are Paddle's 1F1B, with or without virtual stages (Narayanan et al. 2021), and ZB-H1 (Qi et al.
2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ppfleetx.config.parallel_plan import PipelineSchedule
from ppfleetx.config.pipeline_order import order_of

_STEADY_ROUNDS = 3
_WEIGHTS = -1


class Span(NamedTuple):
    """One pass of a micro batch on a pipeline stage.

    Attributes:
        start, end: seconds from the start of the step.
        chunk: the virtual stage.
        is_weights: whether the pass computes only weight gradients (ZB-H1).
    """

    stage: int
    start: float
    end: float
    is_forward: bool
    chunk: int
    micro: int
    is_weights: bool = False


class Messages(NamedTuple):
    """The time of messages between neighboring pipeline stages, and whether senders wait.

    Attributes:
        seconds: the time of one message.
        output_waits: whether a stage waits until the activation that it sends has been received.
        gradient_waits: whether a stage waits until the gradient that it sends has been received.
    """

    seconds: float
    output_waits: bool = True
    gradient_waits: bool = True


@dataclass(frozen=True)
class Timeline:
    """The result of simulating a step.

    Attributes:
        spans: the simulated passes. They can be those of a shorter step, because a long step is not simulated
            in full.
        seconds: the time from the start of the first pass to the end of the last pass of the whole step.
    """

    spans: tuple[Span, ...]
    seconds: float


def simulate(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    micro_batches: int,
    messages: Messages,
    *,
    whole: bool = False,
    forwards_first: bool = False,
    weights: Sequence[float] | None = None,
) -> Timeline:
    """Simulate when each pipeline stage computes its passes of one step.

    Args:
        forward, backward: seconds of the passes of one micro batch, ``[stage][virtual stage]``.
        whole: whether to simulate every micro batch, even of a long step. If False, the time of a long step
            is extrapolated from two shorter ones.
        forwards_first: whether a schedule with virtual stages runs all forward passes first.
        weights: under ZB-H1, the seconds that each stage spends on weight gradients in one backward pass.
            They are included in ``backward``. None: the schedule is 1F1B.
    """
    num_stages, num_chunks = len(forward), len(forward[0])
    assert weights is None or num_chunks == 1, "ZB-H1 is of whole stages"
    later = weights or [0.0] * num_stages
    inputs = [[seconds - rest for seconds in row] for row, rest in zip(backward, later, strict=True)]

    def play(count: int) -> Timeline:
        if num_chunks == 1:
            order = partial(_order, "1f1b" if weights is None else "zb_h1")
        else:
            order = partial(_interleaved_order, num_chunks=num_chunks, forwards_first=forwards_first)
        orders = [
            order(stage=stage, num_stages=num_stages, micro_batches=count) for stage in range(num_stages)
        ]
        return _Stages(forward, inputs, later, messages).simulate(orders)

    shown = num_stages * (_STEADY_ROUNDS + num_chunks - 1)
    if whole or forwards_first or micro_batches <= shown + num_stages:
        return play(micro_batches)
    extra = (micro_batches - shown) % num_stages
    some, more = play(shown + extra), play(shown + extra + num_stages)
    rounds = (micro_batches - shown - extra) // num_stages
    return Timeline(more.spans, some.seconds + rounds * (more.seconds - some.seconds))


class _Stages:
    def __init__(
        self,
        forward: Sequence[Sequence[float]],
        backward: Sequence[Sequence[float]],
        weights: Sequence[float],
        messages: Messages,
    ) -> None:
        self._forward, self._backward, self._weights = forward, backward, weights
        self._messages = messages
        self._num_stages = len(forward)
        self._last = self._num_stages * len(forward[0]) - 1
        self._clock = [0.0] * self._num_stages
        self._gone = [[0.0, 0.0] for _ in forward]  # arrival of each stage's last gradient and last output
        # arrival of the input of each pass: (is forward, virtual stage in model order, micro batch)
        self._arrived: dict[tuple[bool, int, int], float] = {}
        self._spans: list[Span] = []

    def simulate(self, orders: Sequence[Sequence[tuple[bool, int, int]]]) -> Timeline:
        """Simulate the passes of a step. ``orders[s]`` lists the passes of pipeline stage s in order.

        Each pass starts when its stage is free and its input has arrived.
        """
        positions = [0] * self._num_stages
        waiting = list(range(self._num_stages))
        while waiting:
            stage = waiting.pop()
            order = orders[stage]
            while positions[stage] < len(order) and self._is_ready(stage, *order[positions[stage]]):
                waiting += self._run(stage, *order[positions[stage]])
                positions[stage] += 1
        assert all(p == len(o) for p, o in zip(positions, orders, strict=True)), "the schedule is stuck"
        return Timeline(tuple(self._spans), max(self._clock))

    def _place(self, stage: int, chunk: int) -> int:
        return chunk * self._num_stages + stage

    def _is_ready(self, stage: int, is_forward: bool, chunk: int, micro: int) -> bool:
        place = self._place(stage, chunk)
        return chunk == _WEIGHTS or (is_forward and place == 0) or (is_forward, place, micro) in self._arrived

    def _run(self, stage: int, is_forward: bool, chunk: int, micro: int) -> list[int]:
        """Run one pass of a stage, and send the output.

        Returns a list with the stage that receives the output, or an empty list if no other stage does.
        """
        if chunk == _WEIGHTS:
            start, end = self._clock[stage], self._clock[stage] + self._weights[stage]
            self._clock[stage] = end
            self._spans.append(Span(stage, start, end, False, 0, micro, is_weights=True))
            return []
        place = self._place(stage, chunk)
        start = max(self._clock[stage], self._arrived.get((is_forward, place, micro), 0.0))
        end = start + (self._forward if is_forward else self._backward)[stage][chunk]
        self._clock[stage] = end
        self._spans.append(Span(stage, start, end, is_forward, chunk, micro))
        if is_forward and place == self._last:
            self._arrived[(False, place, micro)] = end
            return []
        return self._send(stage, is_forward, place, micro) if is_forward or place > 0 else []

    def _send(self, stage: int, is_forward: bool, place: int, micro: int) -> list[int]:
        following = place + 1 if is_forward else place - 1
        comes = max(self._clock[stage], self._gone[stage][is_forward]) + self._messages.seconds
        self._gone[stage][is_forward] = self._arrived[(is_forward, following, micro)] = comes
        if self._messages.output_waits if is_forward else self._messages.gradient_waits:
            self._clock[stage] = comes
        receiver = following % self._num_stages
        return [] if receiver == stage else [receiver]


def _order(
    schedule: PipelineSchedule, stage: int, num_stages: int, micro_batches: int
) -> list[tuple[bool, int, int]]:
    """Return the passes of a stage, in order, as (is forward, virtual stage, micro batch).

    The virtual stage is 0, or ``_WEIGHTS`` for a pass that computes weight gradients (ZB-H1).
    """
    order = order_of(schedule, stage, num_stages, micro_batches)
    return [(part == "F", _WEIGHTS if part == "W" else 0, micro) for part, micro in order]


def _interleaved_order(
    stage: int, num_stages: int, num_chunks: int, micro_batches: int, forwards_first: bool
) -> list[tuple[bool, int, int]]:
    """Return the passes of a stage under 1F1B with virtual stages, in order, as (is forward, virtual stage,
    micro batch)."""
    total = micro_batches * num_chunks
    ahead = (num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages
    ahead = total if forwards_first else min(ahead, total)
    forwards = [(True, *_place(k, num_stages, num_chunks, backwards=False)) for k in range(total)]
    backwards = [(False, *_place(k, num_stages, num_chunks, backwards=True)) for k in range(total)]
    order = forwards[:ahead]
    for k in range(total - ahead):
        order += (forwards[ahead + k], backwards[k])
    return order + backwards[total - ahead :]


def _place(k: int, num_stages: int, num_chunks: int, *, backwards: bool) -> tuple[int, int]:
    """Return (virtual stage, micro batch) of a stage's ``k``-th forward or backward pass, counted from 0."""
    # Each virtual stage computes num_stages micro batches before the next one takes its turn.
    group, within = divmod(k, num_stages * num_chunks)
    chunk, micro = divmod(within, num_stages)
    return (num_chunks - 1 - chunk if backwards else chunk), group * num_stages + micro
