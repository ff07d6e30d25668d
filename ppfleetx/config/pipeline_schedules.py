"""The order of forward and backward passes on a pipeline rank, for training and for the planner."""

from __future__ import annotations

from typing import Literal, NamedTuple

PipelineSchedule = Literal["1f1b", "zb_h1"]
Part = Literal["F", "B", "W"]


class Pass(NamedTuple):
    """One unit of work on a pipeline rank, for one micro batch.

    Attributes:
        part: ``F``: forward pass; ``B``: gradients of inputs; ``W``: gradients of weights.
        micro: the index of the micro batch, from 0.
    """

    part: Part
    micro: int


def order_of(schedule: PipelineSchedule, stage: int, num_stages: int, micro_batches: int) -> list[Pass]:
    """List the passes of one step on pipeline rank ``stage``, in order.

    In the schedule ``1f1b`` (Narayanan et al. 2021), ``B`` is the whole backward pass, and there is no ``W``.
    """
    order = zero_bubble_order(stage, num_stages, micro_batches)
    return order if schedule == "zb_h1" else [work for work in order if work.part != "W"]


def zero_bubble_order(stage: int, num_stages: int, micro_batches: int) -> list[Pass]:
    """List the passes of one step on pipeline rank ``stage`` in the schedule ZB-H1.

    Forward passes (F) and input gradients (B) have the order of 1F1B. The weight gradients (W) of a micro
    batch follow later: rank ``stage`` first computes B for ``stage`` more micro batches. So the last W fill
    the time at the end of the step in which ranks wait under 1F1B. No rank holds the activations of more
    micro batches than the first rank does under 1F1B.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.2.
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
