"""Published memory of a card, and the runs it is of as cases of the planner."""

from __future__ import annotations

from dataclasses import dataclass

from ppfleetx.config.plan import ParallelPlan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.planner.cards import GIB, load_card
from ppfleetx.planner.job import Job, Precision
from ppfleetx.planner.memory import stage_memory
from ppfleetx.planner.network import Cluster
from tests.planner.published import SEQ_LEN, rows_of

BLOOM_FRAGMENTS = 0.30
"""What PyTorch's allocator lost under Megatron-DeepSpeed: the median of BLOOM's trials of 2022-02-21."""
NANOTRON_FRAGMENTS = 0.08
"""The same of nanotron's runs: the median of the rows with an even number."""


@dataclass(frozen=True)
class PublishedMemory:
    """A run with stated memory: GiB (nanotron: GB) predicted and measured (None: out of memory).

    Attributes:
        fitted: its row was among those that the allocator's share was taken from.
    """

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
        job = Job(
            model=_model(hidden, layers, 64, 250_880, SEQ_LEN),
            plan=ParallelPlan(sharding=number["dp"], mp=number["mp"], pp=pp, pp_layers=uneven),
            micro_batch=number["micro"],
            accumulate=2048 // (number["dp"] * number["micro"]),
            seq_len=SEQ_LEN,
            precision=Precision("bfloat16", True, main_grads=number["gradient_bytes"] == 4),
            recomputed=("full",) * layers,
            kernels="fused",
            flat_states=True,
            fragments=BLOOM_FRAGMENTS,
        )
        most = max(stage_memory(job, cluster, stage).total for stage in (0, pp - 1)) / GIB
        measured = None if row["memory"] == "OOM" else float(row["memory"])
        name = f"dp {row['dp']}, mp {row['mp']}, pp {row['pp']}, micro {row['micro']}"
        found.append(PublishedMemory(name, most, measured, fitted=bool(number["fitted"])))
    return found


def nanotron_memory() -> list[PublishedMemory]:
    """nanotron's best plans of three Llama-like models on H100s (its benchmark picture), fused attention."""
    cluster, found = Cluster(load_card("H100-80GB")), []
    for number, row in enumerate(rows_of("nanotron_memory.csv")):
        layers, hidden, pp = int(row["layers"]), int(row["hidden"]), int(row["pp"])
        model = ModelConfig(
            vocab_size=131_072,
            hidden_size=hidden,
            num_layers=layers,
            num_attention_heads=32,
            head_dim=hidden // 32,
            ffn_hidden_size=int(row["ffn"]),
            max_position_embeddings=4096,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            hidden_act="swiglu",
            normalization="RMSNorm",
            position_embedding_type="rope",
            tie_word_embeddings=row["tied"] == "1",
        )
        replicas, zero = int(row["dp"]), row["zero"] == "1"
        plan = ParallelPlan(
            dp=1 if zero else replicas,
            sharding=replicas if zero else 1,
            mp=int(row["mp"]),
            pp=pp,
            sequence_parallel=row["mp"] != "1",
        )
        job = Job(
            model=model,
            plan=plan,
            micro_batch=int(row["micro"]),
            accumulate=int(row["accumulate"]),
            seq_len=4096,
            precision=Precision("bfloat16", lowers_parameters=True, main_grads=True),
            recomputed=("none",) * layers,
            flash=True,
            kernels="fused",
            flat_states=True,
            fragments=NANOTRON_FRAGMENTS,
        )
        most = max(stage_memory(job, cluster, stage).total for stage in {0, pp - 1}) / 1e9
        name = f"{row['model']}, {plan}, micro {row['micro']}"
        found.append(PublishedMemory(name, most, float(row["memory"]), fitted=number % 2 == 0))
    return found


def fleetx_memory() -> list[PublishedMemory]:
    """PaddleFleetX's 345M and 1.3B (with recompute) on a V100, micro batch 8.

    The stated "G" are taken as what nvidia-smi shows, GiB with the driver's context. Its gradients are set to
    zero and never freed, which is as in a step of several micro batches.
    """
    cluster, found = Cluster(load_card("V100-32GB")), []
    for name, hidden, recompute, measured in (("345M", 1024, "none", 30.9), ("1.3B", 2048, "full", 26.0)):
        job = Job(
            model=_model(hidden, 24, 16, 50_304, 1024),
            plan=ParallelPlan(),
            micro_batch=8,
            accumulate=2,
            seq_len=1024,
            precision=Precision("float16", True, main_grads=False),
            recomputed=(recompute,) * 24,
            kernels="fused",
        )
        found.append(PublishedMemory(name, stage_memory(job, cluster, 0).total / GIB, measured))
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
