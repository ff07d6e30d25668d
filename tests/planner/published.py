"""Published runs as cases of the planner."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.config.plan import ParallelPlan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.planner.cards import GIB, load_card
from ppfleetx.planner.case import Case, Precision
from ppfleetx.planner.memory import stage_memory
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


@dataclass(frozen=True)
class PublishedMemory:
    """A run with stated memory: GiB predicted and measured (None: out of memory), and whether it was fitted
    to."""

    name: str
    predicted: float
    measured: float | None
    fitted: bool = False

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        assert self.measured is not None
        return self.predicted / self.measured - 1


def bloom_memory() -> list[PublishedMemory]:
    """BLOOM's trials on A100s: ZeRO-1 with flat partitions, full recompute."""
    cluster, found = Cluster(load_card("A100-80GB")), []
    for row in rows_of("bloom_memory.csv"):
        number = {key: int(value) for key, value in row.items() if key != "memory"}
        hidden, layers, pp = number["hidden"], number["layers"], number["pp"]
        share, rest = divmod(layers, pp)
        uneven = tuple(share + (stage < rest) for stage in range(pp)) if rest else None
        case = Case(
            model=_model(hidden, layers, 64, 250_880, SEQ_LEN),
            plan=ParallelPlan(sharding=number["dp"], mp=number["mp"], pp=pp, pp_layers=uneven),
            micro_batch=number["micro"],
            accumulate=2048 // (number["dp"] * number["micro"]),
            seq_len=SEQ_LEN,
            precision=Precision("bfloat16", True, main_grads=number["gradient_bytes"] == 4),
            recomputed=("full",) * layers,
            kernels="fused",
            flat_states=True,
        )
        most = max(stage_memory(case, cluster, stage).total for stage in (0, pp - 1)) / GIB
        measured = None if row["memory"] == "OOM" else float(row["memory"])
        name = f"dp {row['dp']}, mp {row['mp']}, pp {row['pp']}, micro {row['micro']}"
        found.append(PublishedMemory(name, most, measured, fitted=bool(number["fitted"])))
    return found


def fleetx_memory() -> list[PublishedMemory]:
    """PaddleFleetX's 345M and 1.3B (with recompute) on a V100, micro batch 8.

    The stated "G" are taken as what nvidia-smi shows, GiB with the driver's context. Its gradients are set to
    zero and never freed, which is as in a step of several micro batches.
    """
    cluster, found = Cluster(load_card("V100-32GB")), []
    for name, hidden, recompute, measured in (("345M", 1024, "none", 30.9), ("1.3B", 2048, "full", 26.0)):
        case = Case(
            model=_model(hidden, 24, 16, 50_304, 1024),
            plan=ParallelPlan(),
            micro_batch=8,
            accumulate=2,
            seq_len=1024,
            precision=Precision("float16", True, main_grads=False),
            recomputed=(recompute,) * 24,
            kernels="fused",
        )
        found.append(PublishedMemory(name, stage_memory(case, cluster, 0).total / GIB, measured))
    return found


def _model(hidden: int, layers: int, heads: int, vocab_size: int, seq_len: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=seq_len,
        attention_kernel="reference",
    )
