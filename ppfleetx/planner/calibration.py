"""Fit the planner's constants of a card to step times measured in the user's own runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.planner.cards import Card
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import Job, job_of
from ppfleetx.planner.step_time import step_time
from ppfleetx.utils.output_files import atomic_write, refuse_as_new_file

_WARM_UP = 2
# Groups of constants, fitted one after another in several sweeps. Compute speed comes first, because every
# run determines it.
_COMPUTE = ("matmul_efficiency", "memory_efficiency")
_OTHERS = {
    ("kernel_latency_us", "matmul_latency_us"): 0.01,
    ("link_gb_s",): 0.05,
    ("network_efficiency",): 0.1,
    ("link_latency_us",): 0.004,
    ("network_latency_us",): 0.05,
}
"""Penalty on the squared logarithm of each constant's scale factor (ridge regression). The penalty keeps
constants that the runs do not determine near the card's values. It is small for latencies, which depend on
the host, and large for the network's speed, which the vendor states.
"""
_SWEEPS = 6


@dataclass(frozen=True)
class Observed:
    name: str
    job: Job
    seconds: float


def calibrate(directories: Sequence[str], cluster: Cluster, target: str | None) -> tuple[Card, str]:
    """Fit the constants of the cluster's card to measured step times.

    Returns the fitted card, and a string that compares the prediction errors before and after the fit. With
    only one run, only the efficiencies of matmuls and memory access are fitted.

    Args:
        directories: the ``output_dir`` of each run, with ``config.yaml`` and ``metrics.jsonl``.
        target: the file to write the card to, or None.

    Raises:
        ConfigError: a directory is not the output of a run, or its metrics have too few records of steps.
            Also if ``target`` exists already, or if its parent directory does not exist.
    """
    runs = [_observed(Path(name), cluster.card) for name in directories]
    fitted = _fitted(cluster, runs)
    lines = [
        f"calibrated to {len(runs)} run{'s' if len(runs) > 1 else ''}; predicted step, before and after:"
    ]
    for run in runs:
        before = step_time(run.job, cluster).seconds
        after = step_time(run.job, replace(cluster, card=fitted)).seconds
        lines.append(
            f"  {run.name}: measured {run.seconds:.4g} s, before {before:.4g} s "
            f"({before / run.seconds - 1:+.0%}), "
            f"after {after:.4g} s ({after / run.seconds - 1:+.0%})"
        )
    if target is not None:
        _write(fitted, Path(target))
        lines.append(f"  written to {target}")
    return fitted, "\n".join(lines) + "\n"


def _observed(directory: Path, card: Card) -> Observed:
    config, metrics = directory / "config.yaml", directory / "metrics.jsonl"
    if not config.is_file() or not metrics.is_file():
        raise ConfigError(
            "must be the output directory of a run, with config.yaml and metrics.jsonl",
            key="--calibrate",
            value=directory,
        )
    seconds = _step_seconds(metrics)
    if not seconds:
        raise ConfigError(
            f"has no usable record in metrics.jsonl that begins after the first {_WARM_UP} steps, which are "
            "not counted; train for more steps, or set a smaller Engine.logging_freq",
            key="--calibrate",
            value=directory,
        )
    job = job_of(load_config(config), card)
    return Observed(str(directory), job, statistics.median(seconds))


def _step_seconds(path: Path) -> list[float]:
    """Return the mean step time of each training record in ``metrics.jsonl``, in seconds. The wait for data
    is excluded.

    Records that begin in the warm-up steps are left out. An incomplete last line is ignored. Raises
    ConfigError if any other line is not a record.
    """
    found, steps = [], 0
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # an incomplete last line is ignored
        try:
            record = json.loads(line)
            if record["kind"] == "train":
                if steps >= _WARM_UP:
                    found.append(record["batch_cost"] - record.get("reader_cost", 0.0))
                steps += record.get("num_steps", 1)
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                "holds a line that is not the record of a step", key="--calibrate", value=path
            ) from None
    return found


def _fitted(cluster: Cluster, runs: Sequence[Observed]) -> Card:
    groups = [_COMPUTE] if len(runs) == 1 else [_COMPUTE, *_OTHERS]
    card = cluster.card
    for _ in range(_SWEEPS):
        for names in groups:
            card = _best_scale(card, names, cluster, runs)
    return card


def _best_scale(card: Card, names: Sequence[str], cluster: Cluster, runs: Sequence[Observed]) -> Card:
    """Return ``card`` with the constants ``names`` scaled by the best common factor.

    Several factors are tried. The best one minimizes the squared errors on ``runs`` plus the penalties in
    :data:`_OTHERS`.
    """
    best, least = card, _distance(card, cluster, runs)
    for steps in (
        (0.25, 0.5, 2.0, 4.0),
        (0.7, 0.85, 1.18, 1.43),
        (0.9, 0.95, 1.05, 1.1),
        (0.98, 0.99, 1.01, 1.02),
    ):
        start = best
        for factor in steps:
            tried = _scaled(start, names, factor)
            distance = _distance(tried, cluster, runs)
            if distance < least - 1e-12:
                best, least = tried, distance
    return best


def _distance(card: Card, cluster: Cluster, runs: Sequence[Observed]) -> float:
    there = replace(cluster, card=card)
    wrong = sum(math.log(step_time(run.job, there).seconds / run.seconds) ** 2 for run in runs)
    return wrong + sum(w * _log_factor(card, cluster.card, names[0]) ** 2 for names, w in _OTHERS.items())


def _log_factor(card: Card, stated: Card, name: str) -> float:
    now, then = getattr(card, name), getattr(stated, name)
    if isinstance(now, dict):
        size = min(now)
        now, then = now[size], then[size]
    return math.log(now / then) if now and then else 0.0


def _scaled(card: Card, names: Sequence[str], factor: float) -> Card:
    changed = {}
    for name in names:
        value = getattr(card, name)
        if isinstance(value, dict):
            changed[name] = {size: speed * factor for size, speed in value.items()}
        else:
            changed[name] = min(1.0, value * factor) if name.endswith("efficiency") else value * factor
    name = card.name if card.name.endswith(" calibrated") else f"{card.name} calibrated"
    return card.model_copy(update={**changed, "name": name})


def _write(card: Card, path: Path) -> None:
    refuse_as_new_file(path, "--write-card")
    values = {
        key: value for key, value in card.model_dump(mode="json").items() if key not in ("name", "sources")
    }
    with atomic_write(path, "w") as file:
        file.write(yaml.safe_dump({card.name: values}, sort_keys=False))
