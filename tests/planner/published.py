"""Published runs as cases of the planner."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.config.plan import ParallelPlan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.planner.cards import load_card
from ppfleetx.planner.case import Case, Precision
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.step_time import step_time

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "planner"
SEQ_LEN = 2048


@dataclass(frozen=True)
class PublishedTimes:
    """A golden file of step times: what it is in words, and what its rows do not say."""

    name: str
    words: str
    vocab_size: int = 51_200
    gigabits: float = 1600.0
    held_out: bool = False


TIMES = (
    PublishedTimes(
        "vtrain.csv", "step time: vTrain's plans of four GPTs, rows not fitted", gigabits=800, held_out=True
    ),
    PublishedTimes("korthikanti.csv", "step time: Korthikanti et al. 2022, table 5, 22B to 1T"),
    PublishedTimes("sc21.csv", "step time: Narayanan et al. 2021, table 1, 1.7B to 1T"),
    PublishedTimes("megascale.csv", "step time: MegaScale's Megatron-LM rows, 256 to 12,288 GPUs", 64_000),
)


def time_errors(published: PublishedTimes) -> list[float]:
    """Predicted over measured seconds, minus 1, of each row."""
    cluster = Cluster(load_card("A100-80GB"), network=published.gigabits * 1e9 / 8)
    rows = rows_of(published.name)[1 if published.held_out else 0 :: 2 if published.held_out else 1]
    assert rows
    seconds = [step_time(case_of_row(row, published.vocab_size), cluster).seconds for row in rows]
    return [value / float(row["seconds"]) - 1 for value, row in zip(seconds, rows, strict=True)]


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a golden file."""
    with (GOLDENS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def case_of_row(row: dict[str, str], vocab_size: int) -> Case:
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
    return Case(
        model=model,
        plan=plan,
        micro_batch=number["micro"],
        accumulate=number["batch"] // (number["micro"] * number["dp"]),
        seq_len=SEQ_LEN,
        precision=Precision("float16", lowers_parameters=True, main_grads=False),
        recomputed=(row["recompute"],) * number["layers"],
        kernels="fused",
    )
