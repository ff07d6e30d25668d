"""The order in which a pipeline rank runs the passes of its micro batches."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ppfleetx.config.parallel_plan import PipelineSchedule

Part = Literal["F", "B", "W"]


class Pass(NamedTuple):
    """One pass of a micro batch on a pipeline rank.

    Attributes:
        part: ``F`` for the forward pass, ``B`` for gradients of inputs, ``W`` for gradients of weights.
    """

    part: Part
    micro: int


def order_of(schedule: PipelineSchedule, stage: int, num_stages: int, micro_batches: int) -> list[Pass]:
    """List the passes of one step on pipeline rank ``stage``, in order.

    In the schedule ``1f1b`` (Narayanan et al. 2021), ``B`` is the whole backward pass.
    """
    order = zero_bubble_order(stage, num_stages, micro_batches)
    return order if schedule == "zb_h1" else [work for work in order if work.part != "W"]


def zero_bubble_order(stage: int, num_stages: int, micro_batches: int) -> list[Pass]:
    """List the passes of one step on pipeline rank ``stage`` in the schedule ZB-H1.

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
        # Weight gradients are computed ``stage`` micro batches later than input gradients. The last ones fill
        # the bubble at the end of the step.
        if waiting > stage:
            order.append(Pass("W", micro + 1 - waiting))
            waiting -= 1
    return order + [Pass("W", micro) for micro in range(micro_batches - waiting, micro_batches)]
