"""Predict memory, step time and cost of one model under one parallel plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.gpt.spec import parameter_count
from ppfleetx.planner.cards import GIB, any_card, card_of_run
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import Job, job_of
from ppfleetx.planner.memory import CARD_PARTS, StageMemory, stage_memory
from ppfleetx.planner.mfu import model_flops_utilization, step_flops, tflops_per_device
from ppfleetx.planner.plan_to_config import plan_text
from ppfleetx.planner.step_time import (
    StepTime,
    estimate_seconds,
    spread,
    step_time,
)

HOUR = 3_600.0
_DAY = 24 * HOUR


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and step time of ``job`` on ``cluster``, computed when first read."""

    job: Job
    cluster: Cluster

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        return tuple(stage_memory(self.job, self.cluster, stage) for stage in range(self.job.plan.pp))

    @cached_property
    def fullest(self) -> float:
        """The peak memory of the fullest rank in bytes, while the model is built or in a step."""
        plan = self.job.plan
        # Of equal stages, the first keeps the most activations, and the last has the logits.
        stages = {0, plan.pp - 1} if self.job.has_equal_stages else range(plan.pp)
        return max(stage_memory(self.job, self.cluster, stage).peak for stage in stages)

    @property
    def fits(self) -> bool:
        return self.fullest <= self.cluster.card.memory_gib * GIB

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.job, self.cluster)

    @property
    def likely_at_most(self) -> float:
        """The upper bound of the likely step time in seconds. A search for the fastest plan ranks plans by
        this bound."""
        return self.time.interval[2]

    @cached_property
    def estimated_at_most(self) -> float:
        """The upper bound of the likely step time in seconds, estimated without simulating the pipeline
        schedule."""
        return estimate_seconds(self.job, self.cluster) * spread(self.job, self.cluster)[1]

    @property
    def host(self) -> float:
        """The largest host memory that a rank needs, in bytes. It holds offloaded optimizer states, and
        checkpoints that are written in the background."""
        return max(stage.host for stage in self.memory)

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens / self.time.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, from 0 to 1. All pairs of positions count in attention, not only the
        causal half."""
        return model_flops_utilization(self.job, self.time.seconds, self.cluster.card)

    def as_json(self, tokens: float) -> dict[str, Any]:
        """Return the JSON object that ``ppfleetx plan --json`` prints for this plan, with the cost of a run
        over ``tokens`` tokens."""
        flops, seconds, run = step_flops(self.job), self.time.seconds, run_length(self, tokens)
        return {
            "plan": plan_text(self.job),
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
                "full_attention": round(tflops_per_device(flops.full, seconds, self.job), 4),
                "causal_attention": round(tflops_per_device(flops.causal, seconds, self.job), 4),
                "with_recompute": round(tflops_per_device(flops.hardware, seconds, self.job), 4),
            },
            "bubble": round(self.time.bubble, 6),
            "exposed_comm_s": round(self.time.exposed_communication, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "parameters": parameter_count(self.job.model),
            "devices": self.job.plan.world_size,
            "global_batch_size": self.job.global_batch,
            "tokens": run.tokens,
            "days": round(run.days, 4),
            "card_hours": round(run.card_hours, 2),
        }


@dataclass(frozen=True)
class RunLength:
    tokens: float
    steps: float
    days: float
    card_hours: float

    def cost(self, per_hour: float) -> tuple[float, float]:
        """Return the cost of the run, and the cost per million tokens. ``per_hour`` is the price of a
        card-hour."""
        whole = self.card_hours * per_hour
        return whole, whole / self.tokens * 1e6


def run_length(prediction: Prediction, tokens: float) -> RunLength:
    steps = tokens / prediction.job.tokens
    seconds = steps * prediction.time.seconds
    cards = prediction.job.plan.world_size
    return RunLength(tokens, steps, seconds / _DAY, seconds / HOUR * cards)


def run_prediction(cfg: RunConfig, device: str, *, device_name: str = "") -> Prediction | None:
    """Predict the memory and the step time of a configured run. Returns None if :func:`memory_prediction`
    does, and if the card's speed in the run's data type is unknown."""
    prediction = memory_prediction(cfg, device, device_name)
    if prediction is None or prediction.job.precision.compute not in prediction.cluster.card.peak_tflops:
        return None
    return prediction


def memory_prediction(cfg: RunConfig, device: str, device_name: str = "") -> Prediction | None:
    """Predict the memory of a configured run under its own plan; None if the run does not train the built-in
    GPT.

    The run is predicted for the card ``Global.card``. If that is unset, the card follows from ``device_name``
    or, if no card matches, from ``device``.

    Args:
        device: the kind of device, such as ``gpu``.
        device_name: the driver's name of the device, such as ``NVIDIA A100-SXM4-80GB``; "" if unknown.

    Raises:
        ConfigError: there is no card with the name in ``Global.card``.
    """
    if cfg.Data.Train is None or cfg.Model.name != "GPT":
        return None
    card = card_of_run(cfg, device_name) or any_card(device)
    return Prediction(job_of(cfg, card), Cluster(card))
