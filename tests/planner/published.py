"""Published runs as cases of the planner."""

from __future__ import annotations

import csv
from pathlib import Path

from ppfleetx.config.plan import ParallelPlan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.planner.case import Case, Precision

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "planner"
SEQ_LEN = 2048


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
    )
