"""Published step times, and the runs they are of as cases of the planner."""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ppfleetx.config.plan import AXES, ParallelPlan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.planner.cards import load_card
from ppfleetx.planner.job import Job, Precision
from ppfleetx.planner.network import Cluster, rival_groups
from ppfleetx.planner.step_time import StepTime, step_time

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "planner"
SEQ_LEN = 2048
MEGATRON_AXES = ("pp", "dp", "sharding", "sep", "mp")
"""Megatron-LM's order of ranks: pipeline stages lie farthest apart."""


@dataclass(frozen=True)
class PublishedTimes:
    """A golden file of step times: what it is in words, and what its rows do not say."""

    name: str
    words: str
    vocab_size: int = 51_200
    gigabits: float = 1600.0
    held_out: bool = False
    axes: tuple[str, ...] = AXES


TIMES = (
    PublishedTimes(
        "vtrain.csv",
        "step time: vTrain's plans of four GPTs, rows not fitted",
        gigabits=800,
        held_out=True,
        axes=MEGATRON_AXES,
    ),
    PublishedTimes("korthikanti.csv", "step time: Korthikanti et al. 2022, table 5, 22B to 1T"),
    PublishedTimes("sc21.csv", "step time: Narayanan et al. 2021, table 1, 1.7B to 1T"),
    PublishedTimes("megascale.csv", "step time: MegaScale's Megatron-LM rows, 256 to 12,288 GPUs", 64_000),
)


@cache
def time_errors(published: PublishedTimes) -> list[float]:
    """Predicted over measured seconds, minus 1, of each row."""
    rows = rows_of(published.name)[1 if published.held_out else 0 :: 2 if published.held_out else 1]
    assert rows
    seconds = [_step(row, published).seconds for row in rows]
    return [value / float(row["seconds"]) - 1 for value, row in zip(seconds, rows, strict=True)]


def _step(row: dict[str, str], published: PublishedTimes) -> StepTime:
    return step_time(case_of_row(row, published.vocab_size), _cluster(published))


def _cluster(published: PublishedTimes) -> Cluster:
    return Cluster(load_card("A100-80GB"), network=published.gigabits * 1e9 / 8, axes=published.axes)


@dataclass(frozen=True)
class Interval:
    """Seconds of a row, with the number of tensor-parallel groups that share a node and its network."""

    measured: float
    predicted: float
    high: float
    rivals: int


@cache
def intervals(published: PublishedTimes) -> list[Interval]:
    """Of each row."""
    found = []
    for row in rows_of(published.name):
        step, cluster = _step(row, published), _cluster(published)
        rivals = rival_groups(case_of_row(row, published.vocab_size).plan, cluster)
        found.append(Interval(float(row["seconds"]), step.seconds, step.interval[2], rivals))
    return found


@cache
def regret(published: PublishedTimes) -> dict[str, float]:
    """By model, how much slower than the best measured plan the one is that is ranked first."""
    models: dict[str, list[tuple[float, float]]] = {}
    for row in rows_of(published.name):
        pair = (_step(row, published).interval[2], float(row["seconds"]))
        models.setdefault(row["model"], []).append(pair)
    return {name: min(pairs)[1] / min(real for _, real in pairs) - 1 for name, pairs in models.items()}


@cache
def mpt_errors(card: str) -> list[float]:
    """MosaicML's MPT models with fused attention on one node, the rows with an odd number: predicted over
    measured seconds, minus 1.

    Their FSDP fetches parameters and sums gradients behind the passes, which this engine does not: that
    communication is left out. So are the 30B rows, whose small micro batches cannot hide it.
    """
    rows = [row for row in rows_of("mpt.csv") if row["card"] == card and row["model"] != "30b"]
    return [_mpt_seconds(row) / float(row["seconds"]) - 1 for row in rows[1::2]]


def _mpt_seconds(row: dict[str, str]) -> float:
    number = {key: int(row[key]) for key in ("hidden", "layers", "heads", "seq_len", "micro", "accumulate")}
    job = Job(
        model=ModelConfig(
            vocab_size=50_368,
            hidden_size=number["hidden"],
            num_layers=number["layers"],
            num_attention_heads=number["heads"],
            head_dim=number["hidden"] // number["heads"],
            max_position_embeddings=number["seq_len"],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        plan=ParallelPlan(sharding=8, sharding_stage=3),
        micro_batch=number["micro"],
        accumulate=number["accumulate"],
        seq_len=number["seq_len"],
        precision=Precision("bfloat16", lowers_parameters=True, main_grads=False),
        recomputed=(row["recompute"],) * number["layers"],
        flash=True,
    )
    found = step_time(job, Cluster(load_card(row["card"])))
    return found.seconds - found.parts["parameters"] - found.parts["gradients"]


@cache
def ascend_error() -> float:
    """MindSpeed-Core-MS' 39B (38B without its input embedding) on 128 cards 910B, 11.5 s a step: predicted
    over measured seconds, minus 1 (its page on performance tuning)."""
    model = ModelConfig(
        vocab_size=165_664,
        hidden_size=6144,
        num_layers=62,
        num_attention_heads=48,
        num_query_groups=8,
        head_dim=128,
        ffn_hidden_size=27_648,
        hidden_act="swiglu",
        normalization="RMSNorm",
        sandwich_norm=True,
        position_embedding_type="rope",
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        add_bias_linear=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    layers = (4,) * 15 + (2,)
    job = Job(
        model=model,
        plan=ParallelPlan(dp=4, mp=8, pp=4, virtual_pp_degree=4, pp_layers=layers, sequence_parallel=True),
        micro_batch=2,
        accumulate=32,
        seq_len=4096,
        precision=Precision("bfloat16", lowers_parameters=True, main_grads=True),
        recomputed=("none",) * 62,
        flash=True,
        kernels="fused",
    )
    return step_time(job, Cluster(load_card("910B-64GB"), axes=MEGATRON_AXES)).seconds / 11.5 - 1


@cache
def bloom_sweep_errors() -> list[float]:
    """BLOOM's four batch sizes of one plan, after calibrating the machine on its other plans with mp 4.

    That factor is what ``--calibrate`` finds from a run of one's own.
    """
    rows = rows_of("bloom.csv")
    sweep = [row for row in rows if _is_of_sweep(row)]
    others = [row for row in rows if row["mp"] == "4" and row["heads"] in ("64", "96") and row not in sweep]
    factor = statistics.median(float(row["seconds"]) / _bloom_seconds(row) for row in others)
    return [factor * _bloom_seconds(row) / float(row["seconds"]) - 1 for row in sweep]


def _is_of_sweep(row: dict[str, str]) -> bool:
    shape = (row["hidden"], row["heads"], row["mp"], row["pp"], row["micro"])
    return shape == ("13824", "96", "4", "12", "2")


def _bloom_seconds(row: dict[str, str]) -> float:
    job = case_of_row(row, 250_880)
    layers, pp = int(row["layers"]), int(row["pp"])
    share, rest = divmod(layers, pp)
    uneven = tuple(share + (stage < rest) for stage in range(pp)) if rest else None
    plan = replace(job.plan, dp=1, sharding=int(row["dp"]), pp_layers=uneven)
    job = replace(job, plan=plan, precision=Precision("bfloat16", lowers_parameters=True, main_grads=True))
    return step_time(job, Cluster(load_card("A100-80GB"), network=400e9 / 8, axes=MEGATRON_AXES)).seconds


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a golden file."""
    with (GOLDENS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def case_of_row(row: dict[str, str], vocab_size: int) -> Job:
    """The run of a row: 16 bits with gradients of 2 bytes, unfused attention, as those programs had."""
    number = {key: int(row[key]) for key in row if key not in ("model", "recompute", "seconds", "tflops")}
    hidden, heads = number["hidden"], number["heads"]
    model = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=number["layers"],
        num_attention_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=SEQ_LEN,
        attention_kernel="reference",
    )
    plan = ParallelPlan(
        dp=number["dp"],
        mp=number["mp"],
        pp=number["pp"],
        virtual_pp_degree=number["vpp"],
        sequence_parallel=bool(number["sp"]),
    )
    return Job(
        model=model,
        plan=plan,
        micro_batch=number["micro"],
        accumulate=number["batch"] // (number["micro"] * number["dp"]),
        seq_len=SEQ_LEN,
        precision=Precision("float16", lowers_parameters=True, main_grads=False),
        recomputed=(row["recompute"],) * number["layers"],
        kernels="fused",
    )
