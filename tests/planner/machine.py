"""The planner's numbers beside what CPU ranks really take and send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ppfleetx.config.loader import load_config
from ppfleetx.planner.cards import any_card, load_card
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import Job, job_of
from ppfleetx.planner.memory import kept_gradients, stage_memory
from ppfleetx.planner.parameters import held_parameters
from tests.device.place import place
from tests.device.reference import environment
from tests.helpers.ranks import Pools
from tests.planner import measured
from tests.planner.plans import overrides, world_size
from tests.planner.traffic import sent_bytes

CARD = load_card("CPU")


@dataclass(frozen=True)
class Compared:
    """A number of one stage: what it is, predicted, measured."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1; infinite where only one of them is nothing."""
        if self.measured == self.predicted:
            return 0.0
        return self.predicted / self.measured - 1 if self.measured else float("inf")


def case_for(plan: dict[str, Any], family: str, more: Mapping[str, Any] = MappingProxyType({})) -> Job:
    """The planner's job for a plan, with ``more`` overrides."""
    settings = measured.settings(overrides(plan) | more, family)
    return job_of(load_config(measured.CONFIG, settings, world_size=world_size(plan)), CARD)


def compare_memory(
    pools: Pools, plan: dict[str, Any], family: str, more: Mapping[str, Any] = MappingProxyType({})
) -> list[Compared]:
    """Parameters, states, gradients, and the peaks of a step and of the start, of each stage's fullest
    rank."""
    given, world = overrides(plan) | more, world_size(plan)
    job = case_for(plan, family, more)
    found = pools(world).run("tests.planner.measured:memory", overrides=given, family=family, world=world)
    rows = []
    for stage in range(job.plan.pp):
        predicted = stage_memory(job, Cluster(CARD), stage)
        parts = {
            "parameters": predicted.parameters,
            "states": predicted.optimizer,
            "gradients": kept_gradients(job, held_parameters(job, stage)),
            "peak": predicted.tensors,
            "start": predicted.start - predicted.context,
        }
        rows += _fullest_ranks(parts, found, stage)
    return rows


def _fullest_ranks(parts: dict[str, float], found: list[dict[str, Any]], stage: int) -> list[Compared]:
    mine = [result for result in found if result["stage"] == stage]
    return [
        Compared(f"{what} of stage {stage}", value, max(result[what] for result in mine))
        for what, value in parts.items()
    ]


def memory_environment() -> dict[str, str]:
    """Variables of processes whose card's memory is compared. On the reference device each tensor is an
    allocation of its own, and the host waits for each operator. Else tensors that collectives use on streams
    of their own are given back the later, the further the host is ahead."""
    here = place()
    return {"FLAGS_benchmark": "1", **environment(poison=1)} if here.is_reference else here.environment


def compare_device_memory(
    pools: Pools,
    job: tuple[str, dict[str, Any], dict[str, Any]],
    device: str,
    corpus: Path,
    output: Path,
    *,
    is_reference: bool,
) -> list[Compared]:
    """The most memory of a card before the first step, in a step and in a save, of each stage's fullest
    rank: a row of ``DEVICE_PLANS``."""
    family, plan, more = job
    world = world_size(plan)
    values = {
        **measured.SIZES,
        **measured.FAMILIES[family],
        "Model.hidden_size": 256,
        **overrides(plan),
        "Engine.max_steps": 2,
        "Engine.eval_freq": 0,
        "Engine.save_load.save_steps": 2,
        "Engine.save_load.output_dir": str(output),
        "Data.Train.dataset.input_dir": str(corpus),
        "Data.Eval.dataset.input_dir": str(corpus),
        "Global.device": device,
        **more,
    }
    found = pools(world).run(
        "tests.device.cases.memory:peaks",
        timeout=300.0,
        values=values,
        world=world,
        is_reference=is_reference,
    )
    cfg = load_config(measured.CONFIG, [f"{key}={value}" for key, value in values.items()], world_size=world)
    card = any_card(device).model_copy(update={"context_gib": 0.0})
    predicted_case = replace(job_of(cfg, card), fragments=0.0)
    rows = []
    for stage in range(predicted_case.plan.pp):
        predicted = stage_memory(predicted_case, Cluster(card), stage)
        parts = {"start": predicted.start, "step": predicted.total, "save": predicted.save}
        rows += _fullest_ranks(parts, found, stage)
    return rows


def compare_traffic(pools: Pools, plan: dict[str, Any], family: str) -> list[Compared]:
    """Bytes that a rank sends in one step, by stage and axis, the mean over a stage's ranks."""
    given, world = overrides(plan), world_size(plan)
    job = case_for(plan, family)
    found = pools(world).run("tests.planner.measured:traffic", overrides=given, family=family, world=world)
    rows = []
    for stage in range(job.plan.pp):
        predicted = sent_bytes(job, stage)
        mine = [result["sent"] for result in found if result["stage"] == stage]
        sent = {axis: sum(each.get(axis, 0.0) for each in mine) / len(mine) for axis in mine[0]}
        noticed = {axis for axis, number in sent.items() if number > 300}  # the job's scalars aside
        for axis in sorted(noticed | predicted.keys()):
            row = Compared(f"{axis} of stage {stage}", predicted.get(axis, 0.0), sent.get(axis, 0.0))
            rows.append(row)
    return rows
