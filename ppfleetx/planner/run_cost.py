"""Predict the cost of a whole run: days, card-hours, price, and the time for failures and for a batch-size
ramp."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ppfleetx.config.batch_sizes import Ramp
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.parallel_plan import violations
from ppfleetx.models.gpt.spec import parameter_count
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import Job
from ppfleetx.planner.prediction import HOUR, Prediction, run_length
from ppfleetx.planner.step_time import step_time

_NODE_WRITES = 2e9  # bytes/s that a node writes to a shared file system, assumed without --save-seconds


@dataclass(frozen=True)
class Failures:
    """The failure rate of a job, its best checkpoint interval, and the time that failures and checkpoints
    cost.

    Attributes:
        mtbf: mean time between failures of the job, in seconds.
        save: seconds to save a checkpoint.
        interval: the best interval between checkpoints, in seconds.
        steps: the best interval in steps.
        lost: the share of the run's time that failures and checkpoints cost.
    """

    mtbf: float
    save: float
    interval: float
    steps: int
    lost: float


def failures(prediction: Prediction, *, node_mtbf: float, save: float, restart: float) -> Failures:
    """Compute the best interval between checkpoints, and the time that failures and checkpoints then cost.

    The formula is from Daly 2006, equation 37, a refinement of Young 1974.

    Args:
        node_mtbf: mean time between failures of one node, in seconds.
        save: seconds to save a checkpoint.
        restart: seconds to restart after a failure.
    """
    mtbf = node_mtbf / prediction.cluster.num_nodes(prediction.job.plan.world_size)
    interval = _daly(save, mtbf)
    lost = save / (interval + save) + (interval + save) / (2 * mtbf) + restart / mtbf
    steps = max(1, round(interval / prediction.time.seconds))
    return Failures(mtbf, save, interval, steps, min(1.0, lost))


def _daly(save: float, mtbf: float) -> float:
    if save >= 2 * mtbf:
        return mtbf
    half = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - save


def checkpoint_bytes(job: Job) -> float:
    """Return the size of a checkpoint in bytes. It contains the optimizer states, and the float32 master
    weights or, if there are none, the parameters."""
    each = max(job.precision.master_bytes, job.precision.parameter_bytes) + 4 * job.moments
    return parameter_count(job.model) * each


def ramp_seconds(job: Job, cluster: Cluster, ramp: Ramp) -> tuple[float, float]:
    """Return the seconds that a batch-size ramp takes, and the seconds that the same sequences would take in
    full batches.

    Raises:
        ValueError: a batch size or the increment of the ramp is not a multiple of micro batch size x
            data-parallel ranks, the ramp has no batch size below the full one, or the plan has virtual
            stages.
    """
    per_pass = job.plan.data_size * job.micro_batch
    sizes = ramp.sizes
    wrong = next((size for size in (*sizes, ramp.increment) if size % per_pass), None)
    if wrong is not None or not sizes:
        raise ValueError(
            f"a ramp has batches below {job.global_batch} that are multiples of data ranks x micro batch = "
            f"{per_pass}" + ("" if wrong is None else f", not {wrong}")
        )
    if job.plan.virtual_pp_degree > 1:
        raise ValueError(
            "changes the number of micro batches, which the virtual-stage schedule depends on: vpp must be 1 "
            f"(it is {job.plan.virtual_pp_degree})"
        )
    each = ramp.samples / len(sizes)
    seconds = 0.0
    for size in sizes:
        seconds += each / size * step_time(replace(job, accumulate=size // per_pass), cluster).seconds
    return seconds, ramp.samples / job.global_batch * step_time(job, cluster).seconds


@dataclass(frozen=True)
class RunCostOptions:
    """The options of ``ppfleetx plan`` that concern the whole run, such as ``--mtbf``."""

    price: float | None
    node_mtbf_hours: float | None
    save_seconds: float | None
    restart_seconds: float
    scale: tuple[int, ...]
    ramp: tuple[int, int, int] | None

    def as_json(self, prediction: Prediction) -> dict[str, Any]:
        """Return the cost of failures and checkpoints as a dictionary for JSON; empty without ``--mtbf``."""
        if self.node_mtbf_hours is None:
            return {}
        found = self.failures(prediction)
        return {
            "job_mtbf_hours": round(found.mtbf / HOUR, 4),
            "checkpoint_seconds": round(found.save, 3),
            "checkpoint_every_steps": found.steps,
            "lost_share": round(found.lost, 6),
        }

    def failures(self, prediction: Prediction) -> Failures:
        save = self.save_seconds
        if save is None:
            nodes = prediction.cluster.num_nodes(prediction.job.plan.world_size)
            save = checkpoint_bytes(prediction.job) / (nodes * _NODE_WRITES)
        node_mtbf = self.node_mtbf_hours * HOUR
        return failures(prediction, node_mtbf=node_mtbf, save=save, restart=self.restart_seconds)


def answers(prediction: Prediction, tokens: float, asked: RunCostOptions) -> list[str]:
    run = run_length(prediction, tokens)
    lines = [
        "",
        f"The run of {tokens:.4g} tokens takes {run.steps:,.0f} steps, {run.days:,.2f} days and "
        f"{run.card_hours:,.0f} card-hours.",
    ]
    if asked.price is not None:
        whole, million = run.cost(asked.price)
        lines.append(
            f"At {asked.price:g} a card-hour that is {whole:,.0f}, or {million:.4g} a million tokens."
        )
    if asked.node_mtbf_hours is not None:
        lines.append(_failure_line(asked.failures(prediction)))
    if asked.ramp is not None:
        lines.append(_ramp_line(prediction, Ramp(*asked.ramp, prediction.job.global_batch)))
    if asked.scale:
        lines += _scale_lines(prediction, tokens, asked)
    return lines


def _failure_line(found: Failures) -> str:
    return (
        f"The job fails every {found.mtbf / HOUR:,.1f} h. A checkpoint takes {found.save:.1f} s; best is "
        f"every {found.steps:,} steps ({found.interval / 60:.1f} min). Checkpoints, repeated work and "
        f"restarts then take {found.lost:.1%} of the time."
    )


def _ramp_line(prediction: Prediction, ramp: Ramp) -> str:
    try:
        slow, fast = ramp_seconds(prediction.job, prediction.cluster, ramp)
    except ValueError as error:
        raise ConfigError(
            str(error), key="--ramp", value=f"{ramp.start},{ramp.increment},{ramp.samples}"
        ) from None
    return (
        f"The ramp's {ramp.samples:,} sequences take {slow / HOUR:,.2f} h; with the whole batch from the "
        f"start {fast / HOUR:,.2f} h."
    )


def _scale_lines(prediction: Prediction, tokens: float, asked: RunCostOptions) -> list[str]:
    """Return a table of step time, days, card-hours and MFU for other numbers of cards, as a list of lines.
    Only ``dp`` changes; the other degrees and the global batch size stay the same."""
    lines = ["", f"{'cards':>8} {'step s':>9} {'days':>9} {'card-hours':>12} {'MFU':>6}"]
    for cards in asked.scale:
        try:
            other = Prediction(_scaled(prediction.job, cards), prediction.cluster)
        except ValueError as error:
            lines.append(f"{cards:8,} {error}")
            continue
        run = run_length(other, tokens)
        lines.append(
            f"{cards:8,} {other.time.seconds:9.3f} {run.days:9.2f} {run.card_hours:12,.0f} {other.mfu:6.1%}"
        )
    return lines


def _scaled(job: Job, cards: int) -> Job:
    """Return ``job`` with as many replicas as ``cards`` cards hold.

    Raises:
        ValueError: the cards or the batch do not divide, or the plan is not legal with the micro batches
            that a replica has left.
    """
    replica = job.plan.world_size // job.plan.dp
    if cards % replica:
        raise ValueError(f"not a multiple of the {replica} cards of a replica")
    plan = replace(job.plan, dp=cards // replica)
    per_pass = plan.data_size * job.micro_batch
    if job.global_batch % per_pass:
        raise ValueError(
            f"{job.global_batch} sequences a step cannot be split among {plan.data_size} data ranks in micro "
            f"batches of {job.micro_batch}"
        )
    scaled = replace(job, plan=plan, accumulate=job.global_batch // per_pass)
    if broken := violations(plan, scaled.workload):
        raise ValueError(broken[0].rule)
    return scaled
