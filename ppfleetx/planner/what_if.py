"""Questions about the whole run: days and cost, failures, other numbers of cards, a batch that grows."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.planner.long_run import Ramp, checkpoint_bytes, failures, ramp_seconds, run_length
from ppfleetx.planner.prediction import Prediction

_NODE_WRITES = 2e9  # bytes/s of a node into a shared file system, where --save-seconds does not say
_HOUR = 3600.0


@dataclass(frozen=True)
class Questions:
    """What the command line asks beside the plan; None: not asked."""

    price: float | None
    node_mtbf_hours: float | None
    save_seconds: float | None
    restart_seconds: float
    scale: tuple[int, ...]
    ramp: Ramp | None

    def as_json(self, prediction: Prediction) -> dict[str, Any]:
        """Answers to what was asked of failures."""
        if self.node_mtbf_hours is None:
            return {}
        found = failures(
            prediction,
            node_mtbf=self.node_mtbf_hours * _HOUR,
            save=self.saving(prediction),
            restart=self.restart_seconds,
        )
        return {
            "job_mtbf_hours": round(found.mtbf / _HOUR, 4),
            "checkpoint_seconds": round(found.save, 3),
            "checkpoint_every_steps": found.steps,
            "lost_share": round(found.lost, 6),
        }

    def saving(self, prediction: Prediction) -> float:
        """Seconds of a checkpoint."""
        if self.save_seconds is not None:
            return self.save_seconds
        nodes = max(1.0, prediction.case.plan.world_size / prediction.cluster.per_node)
        return checkpoint_bytes(prediction.case) / (nodes * _NODE_WRITES)


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments about the whole run."""
    asked = parser.add_argument_group("about the whole run")
    asked.add_argument("--tokens", type=float, metavar="T", help="tokens of the run (else Engine.max_steps)")
    asked.add_argument(
        "--price", type=float, metavar="P", help="of a card-hour: what the run and a token cost"
    )
    asked.add_argument(
        "--mtbf",
        type=float,
        metavar="HOURS",
        help="between failures of one node: the best checkpoint interval",
    )
    asked.add_argument("--save-seconds", type=float, metavar="S", help="that a checkpoint holds the job up")
    asked.add_argument(
        "--restart-seconds", type=float, default=300.0, metavar="S", help="from failure to step (default 300)"
    )
    asked.add_argument(
        "--scale", metavar="N,N,...", help="the plan with more replicas on other numbers of cards"
    )
    asked.add_argument(
        "--ramp",
        metavar="START,STEP,SAMPLES",
        help="a batch that grows, as Megatron-LM's --rampup-batch-size",
    )


def questions_of(args: argparse.Namespace) -> Questions:
    """What ``args`` ask.

    Raises:
        ConfigError: numbers that cannot be.
    """
    for name in ("price", "mtbf", "save_seconds", "restart_seconds"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError("must be greater than 0", key=f"--{name.replace('_', '-')}", value=value)
    ramp = None
    if args.ramp is not None:
        numbers = _numbers(args.ramp, "--ramp")
        if len(numbers) != 3:
            raise ConfigError("takes three numbers: START,STEP,SAMPLES", key="--ramp", value=args.ramp)
        ramp = Ramp(*numbers)
    scale = _numbers(args.scale, "--scale") if args.scale is not None else ()
    return Questions(args.price, args.mtbf, args.save_seconds, args.restart_seconds, tuple(scale), ramp)


def _numbers(text: str, key: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 12 and int(part) > 0 for part in parts):
        raise ConfigError("takes integers of at least 1, with commas between", key=key, value=text)
    return [int(part) for part in parts]


def answers(prediction: Prediction, tokens: float, asked: Questions) -> list[str]:
    """Lines of text: how long the run takes, and whatever was asked."""
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
        lines.append(_failure_line(prediction, asked))
    if asked.ramp is not None:
        lines.append(_ramp_line(prediction, asked.ramp))
    if asked.scale:
        lines += _scale_lines(prediction, tokens, asked)
    return lines


def _failure_line(prediction: Prediction, asked: Questions) -> str:
    found = failures(
        prediction,
        node_mtbf=asked.node_mtbf_hours * _HOUR,
        save=asked.saving(prediction),
        restart=asked.restart_seconds,
    )
    return (
        f"The job fails every {found.mtbf / _HOUR:,.1f} h. Saving takes {found.save:.1f} s; the best "
        f"is every "
        f"{found.steps:,} steps ({found.interval / 60:.1f} min). Checkpoints, repeated work and restarts "
        f"then take "
        f"{found.lost:.1%} of the time."
    )


def _ramp_line(prediction: Prediction, ramp: Ramp) -> str:
    try:
        slow, fast = ramp_seconds(prediction.case, prediction.cluster, ramp)
    except ValueError as error:
        raise ConfigError(
            str(error), key="--ramp", value=f"{ramp.start},{ramp.increment},{ramp.samples}"
        ) from None
    return (
        f"The ramp's {ramp.samples:,} sequences take {slow / _HOUR:,.2f} h; with the whole batch from "
        f"the start "
        f"{fast / _HOUR:,.2f} h."
    )


def _scale_lines(prediction: Prediction, tokens: float, asked: Questions) -> list[str]:
    """The same model-parallel plan on other numbers of cards, at the same batch."""
    case, lines = (
        prediction.case,
        ["", f"{'cards':>8} {'step s':>9} {'days':>9} {'card-hours':>12} {'MFU':>6}"],
    )
    model_parallel = case.plan.world_size // case.plan.dp
    for cards in asked.scale:
        per_pass = cards // model_parallel * case.plan.sharding * case.micro_batch
        if cards % model_parallel or not per_pass or case.global_batch % per_pass:
            reason = f"not a multiple of {model_parallel} cards, or more replicas than the batch can serve"
            lines.append(f"{cards:8,} {reason}")
            continue
        plan = replace(case.plan, dp=cards // model_parallel)
        other = Prediction(
            replace(case, plan=plan, accumulate=case.global_batch // per_pass), prediction.cluster
        )
        run = run_length(other, tokens)
        lines.append(
            f"{cards:8,} {other.time.seconds:9.3f} {run.days:9.2f} {run.card_hours:12,.0f} {other.mfu:6.1%}"
        )
    return lines
