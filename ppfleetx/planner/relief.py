"""Settings of a run, changed one at a time, that make it need less memory, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ppfleetx.config.plan import violations
from ppfleetx.planner.case import Case
from ppfleetx.planner.prediction import Prediction

_LEAST_SAVING = 0.02
_CHUNKS = 8


@dataclass(frozen=True)
class Relief:
    """One setting.

    Attributes:
        options: for the command line.
        saves: bytes on the fullest rank.
        costs: share by which a step takes longer; 0 where it does not.
    """

    options: str
    saves: float
    costs: float


def reliefs(prediction: Prediction) -> list[Relief]:
    """The settings that save memory, the cheapest first, and of equally cheap ones what saves most."""
    least, seconds = _LEAST_SAVING * prediction.fullest, prediction.time.seconds
    found = []
    for options, case in _candidates(prediction.case):
        if violations(case.plan, case.workload):
            continue
        other = Prediction(case, prediction.cluster)
        saves = prediction.fullest - other.fullest
        if saves > least:
            found.append(Relief(options, saves, max(other.time.seconds / seconds - 1, 0.0)))
    return sorted(found, key=lambda relief: (round(relief.costs, 2), -relief.saves))


def _candidates(case: Case) -> Iterator[tuple[str, Case]]:
    plan, micro, layers = case.plan, case.micro_batch, case.model.num_layers
    if micro % 2 == 0:
        options = f"-o Global.micro_batch_size={micro // 2}"
        yield options, replace(case, micro_batch=micro // 2, accumulate=case.accumulate * 2)
    if case.model.loss_chunks < _CHUNKS:
        model = case.model.model_copy(update={"loss_chunks": _CHUNKS})
        yield f"-o Model.loss_chunks={_CHUNKS}", replace(case, model=model)
    for kind in ("core_attn", "full_attn", "full"):
        if case.recomputed != (kind,) * layers:
            options = f"-o Model.use_recompute=True -o Model.recompute_granularity={kind}"
            yield options, replace(case, recomputed=(kind,) * layers)
    for stage in (1, 2, 3):
        if plan.data_size > 1 and (plan.sharding < plan.data_size or plan.sharding_stage < stage):
            options = (
                f"-o Distributed.dp_degree=1 -o Distributed.sharding.sharding_degree={plan.data_size} "
                f"-o Distributed.sharding.sharding_stage={stage}"
            )
            yield (
                options,
                replace(case, plan=replace(plan, dp=1, sharding=plan.data_size, sharding_stage=stage)),
            )
    if plan.sharding > 1 and not plan.sharding_offload and case.kernels != "cpu":
        options = "-o Distributed.sharding.sharding_offload=True"
        yield options, replace(case, plan=replace(plan, sharding_offload=True))
