"""The order of forward and backward passes on a pipeline rank, for the runner, the planner and the docs."""

from __future__ import annotations

from typing import Literal, NamedTuple

PipelineSchedule = Literal["1f1b", "zb_h1"]
Part = Literal["F", "B", "W"]


class Pass(NamedTuple):
    """One pass of one micro batch on one pipeline rank.

    Attributes:
        part: ``F`` forward pass; ``B`` the gradients of inputs; ``W`` the gradients of weights.
        micro: the index of the micro batch, from 0.
    """

    part: Part
    micro: int


def order_of(schedule: PipelineSchedule, stage: int, num_stages: int, micro_batches: int) -> list[Pass]:
    """The order of the passes on pipeline rank ``stage``. In ``1f1b`` (Narayanan et al. 2021), B is the whole
    backward pass and there is no W.
    """
    order = zero_bubble_order(stage, num_stages, micro_batches)
    return order if schedule == "zb_h1" else [work for work in order if work.part != "W"]


def zero_bubble_order(stage: int, num_stages: int, micro_batches: int) -> list[Pass]:
    """The order of ZB-H1 on pipeline rank ``stage`` (Qi et al., "Zero Bubble Pipeline Parallelism", 2023,
    section 2.2).

    F and B run in the order of 1F1B. W follows ``stage`` micro batches later, to fill the time at the end in
    which 1F1B waits. At most ``num_stages - stage`` micro batches are between F and B, and ``stage`` between
    B and W: no more activations than on the first rank of 1F1B.
    """
    ahead = min(num_stages - 1 - stage, micro_batches)
    order = [Pass("F", micro) for micro in range(ahead)]
    waiting = 0
    for micro in range(micro_batches):
        if ahead + micro < micro_batches:
            order.append(Pass("F", ahead + micro))
        order.append(Pass("B", micro))
        waiting += 1
        if waiting > stage:
            order.append(Pass("W", micro + 1 - waiting))
            waiting -= 1
    return order + [Pass("W", micro) for micro in range(micro_batches - waiting, micro_batches)]
