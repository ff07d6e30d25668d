"""Compare a parallel plan with others: why well-known plans are worse, and which settings save memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ppfleetx.config.parallel_plan import ParallelPlan, violations
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.communication import independent_groups_per_node
from ppfleetx.planner.job import Job
from ppfleetx.planner.prediction import Prediction

_LEAST_SAVING = 0.02  # smallest saving to list, as a share of the memory
_CHUNKS = 8
_PARTS = {
    "matmul": "smaller matrix products",
    "memory": "element-wise operations",
    "tensor_parallel": "sums over tensor-parallel ranks",
    "context_parallel": "exchanges of sequence parts",
    "expert_parallel": "exchanges of rows with experts",
    "parameters": "fetching parameters",
    "pipeline": "pipeline messages",
    "bubble": "an idle pipeline",
    "gradients": "sums of gradients",
    "optimizer": "updates",
    "values": "sending new values",
    "recompute": "recomputation",
}


def why_not(best: Prediction) -> list[str]:
    """Compare ``best`` with well-known plans on the same cards. Returns one line for each well-known plan,
    unless it is the plan of ``best``."""
    job, devices = best.job, best.job.plan.world_size
    sentences = []
    for name, plan in _well_known(job, devices, best.cluster.per_node):
        if plan != job.plan:
            sentences.append(f"{name}: {_verdict(best, plan)}")
    return sentences


def _well_known(job: Job, devices: int, per_node: int) -> Iterator[tuple[str, ParallelPlan]]:
    node = min(per_node, devices)
    split = job.seq_len % node == 0 and node > 1
    yield f"Data parallelism alone (dp={devices})", ParallelPlan(dp=devices)
    if devices > 1:
        whole = ParallelPlan(sharding=devices, sharding_stage=3)
        yield f"Sharding of everything (sharding={devices}, stage=3)", whole
        tensor = ParallelPlan(mp=node, dp=devices // node, sequence_parallel=split)
        if devices % node == 0:
            yield f"Tensor parallelism over a node (mp={node}, dp={devices // node})", tensor
    stages = max(
        (n for n in range(1, devices + 1) if devices % n == job.model.num_layers % n == 0), default=1
    )
    if stages > 1:
        yield f"The longest possible pipeline (pp={stages})", ParallelPlan(pp=stages, dp=devices // stages)
    wide = 2 * node
    if devices % wide == 0:
        split = job.seq_len % wide == 0
        plan = ParallelPlan(mp=wide, dp=devices // wide, sequence_parallel=split)
        yield f"Tensor parallelism over two nodes (mp={wide})", plan
    if job.plan.pp_schedule == "zb_h1":
        yield "The same with schedule 1F1B (zb=0)", replace(job.plan, pp_schedule="1f1b")
    elif job.plan.pp > 1 and job.plan.virtual_pp_degree == 1:
        yield "The same with schedule ZB-H1 (zb=1)", replace(job.plan, pp_schedule="zb_h1")
    if job.plan.virtual_pp_degree > 1:
        yield "The same without virtual stages (vpp=1)", replace(job.plan, virtual_pp_degree=1)
    elif job.plan.sharding > 1:
        yield (
            "The same with replicas instead of sharding",
            replace(job.plan, dp=job.plan.data_size, sharding=1, sharding_stage=1),
        )


def _verdict(best: Prediction, plan: ParallelPlan) -> str:
    job = best.job
    if job.global_batch % plan.data_size:
        return f"{job.global_batch} sequences a step cannot be split among {plan.data_size} data ranks."
    local = job.global_batch // plan.data_size
    micro = max(m for m in range(1, min(local, job.micro_batch) + 1) if local % m == 0)
    tried = replace(job, plan=plan, micro_batch=micro, accumulate=local // micro)
    broken = violations(plan, tried.workload)
    if broken:
        return f"{broken[0].rule}."
    fitting = [
        Prediction(replace(tried, recomputed=(kind,) * job.model.num_layers), best.cluster)
        for kind in ("none", "core_attn", "full")
    ]
    room = best.cluster.card.memory_gib * GIB
    there = next((one for one in fitting if one.fits), None)
    if there is None:
        least = fitting[-1].fullest / GIB
        return f"does not fit, {least:,.0f} GiB are needed of {room / GIB:g} even with full recompute."
    return _slower(best, there)


def _slower(best: Prediction, other: Prediction) -> str:
    slower = other.time.seconds / best.time.seconds - 1
    if slower <= 0 and other.likely_at_most > best.likely_at_most:
        groups = independent_groups_per_node(other.job.plan, other.cluster)
        return (
            f"predicted to take {other.time.seconds:.3f} s, but likely up to {other.likely_at_most:.3f} s, "
            f"because {groups} tensor-parallel groups share a node."
        )
    if slower <= 0:
        return f"as fast as the best ({other.time.seconds:.3f} s)."
    more = {
        name: other.time.parts[name] - best.time.parts[name] for name in _PARTS if name in other.time.parts
    }
    name = max(more, key=lambda part: more[part])
    kind = next(iter(set(other.job.recomputed)))
    with_what = "" if kind == "none" else f", recomputing {kind}"
    return (
        f"{slower:.0%} slower ({other.time.seconds:.3f} s{with_what}), mostly because of {_PARTS[name]} "
        f"(+{more[name]:.3f} s)."
    )


@dataclass(frozen=True)
class MemorySaving:
    """A change of the configuration that saves memory.

    Attributes:
        options: the command-line options that make this change.
        saves: bytes saved on the fullest rank.
        costs: the relative increase of the step time, such as 0.05 for 5%; 0 if a step becomes faster.
    """

    options: str
    saves: float
    costs: float


def memory_savings(prediction: Prediction) -> list[MemorySaving]:
    """Return changes of the configuration that save more than 2% of the memory. The change that increases the
    step time the least comes first.

    Among changes with about the same increase, the one that saves the most memory comes first.
    """
    least, seconds = _LEAST_SAVING * prediction.fullest, prediction.time.seconds
    found = []
    for options, job in _candidates(prediction.job):
        if violations(job.plan, job.workload):
            continue
        other = Prediction(job, prediction.cluster)
        saves = prediction.fullest - other.fullest
        if saves > least:
            found.append(MemorySaving(options, saves, max(other.time.seconds / seconds - 1, 0.0)))
    return sorted(found, key=lambda relief: (round(relief.costs, 2), -relief.saves))


def _candidates(job: Job) -> Iterator[tuple[str, Job]]:
    plan, micro, layers = job.plan, job.micro_batch, job.model.num_layers
    if micro % 2 == 0:
        options = f"-o Global.micro_batch_size={micro // 2}"
        yield options, replace(job, micro_batch=micro // 2, accumulate=job.accumulate * 2)
    if job.model.loss_chunks < _CHUNKS:
        model = job.model.model_copy(update={"loss_chunks": _CHUNKS})
        yield f"-o Model.loss_chunks={_CHUNKS}", replace(job, model=model)
    for kind in ("core_attn", "full_attn", "full"):
        if job.recomputed != (kind,) * layers:
            options = f"-o Model.use_recompute=True -o Model.recompute_granularity={kind}"
            yield options, replace(job, recomputed=(kind,) * layers)
    for stage in (1, 2, 3):
        if plan.data_size > 1 and (plan.sharding < plan.data_size or plan.sharding_stage < stage):
            options = (
                f"-o Distributed.dp_degree=1 -o Distributed.sharding.sharding_degree={plan.data_size} "
                f"-o Distributed.sharding.sharding_stage={stage}"
            )
            yield (
                options,
                replace(job, plan=replace(plan, dp=1, sharding=plan.data_size, sharding_stage=stage)),
            )
    if plan.sharding > 1 and not plan.sharding_offload and job.kernels != "cpu":
        options = "-o Distributed.sharding.sharding_offload=True"
        yield options, replace(job, plan=replace(plan, sharding_offload=True))
