"""One plan's account: memory of each stage, time of a step, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ppfleetx.models.gpt.spec import parameter_count
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.case import Case
from ppfleetx.planner.flops import model_flops_utilization, step_flops, tflops_per_device
from ppfleetx.planner.memory import CARD_PARTS, StageMemory, stage_memory
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.plan_words import plan_words
from ppfleetx.planner.step_time import StepTime, quick_seconds, spread, step_time


@dataclass(frozen=True)
class Prediction:
    """What the planner says of ``case`` on ``cluster``. Parts are computed when they are asked for."""

    case: Case
    cluster: Cluster

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Of a rank of each pipeline stage."""
        return tuple(stage_memory(self.case, self.cluster, stage) for stage in range(self.case.plan.pp))

    @cached_property
    def fullest(self) -> float:
        """Bytes that the fullest rank needs, at the start or in a step. With equal stages that is one of the
        first (most micro batches in flight) or of the last (logits)."""
        plan = self.case.plan
        stages = {0, plan.pp - 1} if plan.pp_layers is None else range(plan.pp)
        return max(stage_memory(self.case, self.cluster, stage).peak for stage in stages)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has the memory."""
        return self.fullest <= self.cluster.card.memory_gib * GIB

    @cached_property
    def time(self) -> StepTime:
        """Of one optimizer step."""
        return step_time(self.case, self.cluster)

    @property
    def likely_at_most(self) -> float:
        """Seconds that a step is likely to take at most: what plans are ranked by."""
        return self.time.interval[2]

    @cached_property
    def quickly_at_most(self) -> float:
        """About :attr:`likely_at_most`, without playing the schedule."""
        return quick_seconds(self.case, self.cluster) * spread(self.case, self.cluster)[1]

    @property
    def host(self) -> float:
        """Bytes of host memory that a rank needs: offloaded states, copies for saving in the background."""
        return max(stage.host for stage in self.memory)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.case.tokens / self.time.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, full attention."""
        return model_flops_utilization(self.case, self.time.seconds, self.cluster.card)

    def as_json(self, tokens: float | None = None) -> dict[str, Any]:
        """The documented object of ``plan --json``; ``tokens`` of the whole run give days and card-hours."""
        flops, seconds = step_flops(self.case), self.time.seconds
        return {
            "plan": plan_words(self.case),
            "step_time_s": [round(value, 6) for value in self.time.interval],
            "step_parts_s": {name: round(value, 6) for name, value in self.time.parts.items()},
            "memory_gib": [round(stage.total / GIB, 4) for stage in self.memory],
            "memory_parts_gib": [
                {part: round(getattr(stage, part) / GIB, 4) for part in CARD_PARTS} for stage in self.memory
            ],
            "save_memory_gib": [round(stage.save / GIB, 4) for stage in self.memory],
            "start_memory_gib": [round(stage.start / GIB, 4) for stage in self.memory],
            "host_memory_gib": round(self.host / GIB, 4),
            "fits": self.fits,
            "mfu": round(self.mfu, 6),
            "tflops_per_device": {
                "full_attention": round(tflops_per_device(flops.full, seconds, self.case), 4),
                "causal_attention": round(tflops_per_device(flops.causal, seconds, self.case), 4),
                "with_recompute": round(tflops_per_device(flops.hardware, seconds, self.case), 4),
            },
            "bubble": round(self.time.bubble, 6),
            "exposed_comm_s": round(self.time.exposed_communication, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "parameters": parameter_count(self.case.model),
            "devices": self.case.plan.world_size,
            "global_batch_size": self.case.global_batch,
            **({} if tokens is None else self._run(tokens)),
        }

    def _run(self, tokens: float) -> dict[str, float]:
        seconds = tokens / self.tokens_per_second
        cards = self.case.plan.world_size
        return {
            "tokens": tokens,
            "days": round(seconds / 86_400, 4),
            "card_hours": round(seconds / 3_600 * cards, 2),
        }
