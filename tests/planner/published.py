"""Published step times, memory and speeds, and the runs they are of as cases of the planner."""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from ppfleetx.config.parallel_plan import AXES, ParallelPlan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.nn.cost import Recompute
from ppfleetx.planner.cards import GIB, load_card
from ppfleetx.planner.communication import Cluster, independent_groups_per_node
from ppfleetx.planner.job import Job, Precision
from ppfleetx.planner.memory import stage_memory
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.step_time import StepTime, step_time

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "planner"
SEQ_LEN = 2048
MEGATRON_AXES = ("pp", "dp", "sharding", "sep", "mp")
"""Megatron-LM's order of ranks: pipeline stages lie farthest apart."""


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {
    **NO_DROPOUT,
    "hidden_act": "swiglu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "tie_word_embeddings": False,
}


def model_of(hidden: int, layers: int, heads: int, vocab: int, seq_len: int, **more: Any) -> ModelConfig:
    """A model of these sizes."""
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_attention_heads": heads, "vocab_size": vocab}
    own = {"head_dim": hidden // heads, "max_position_embeddings": seq_len}
    return ModelConfig(**{**sizes, **own, **more})


def job_of_run(
    model: ModelConfig,
    plan: ParallelPlan,
    micro: int,
    accumulate: int,
    *,
    recompute: Recompute = "none",
    dtype: str = "bfloat16",
    main_grads: bool = True,
    **more: Any,
) -> Job:
    """A run with parameters of 16 bits, on sequences as long as the model takes."""
    return Job(
        model=model,
        plan=plan,
        micro_batch=micro,
        accumulate=accumulate,
        seq_len=model.max_position_embeddings,
        precision=Precision(dtype, lowers_parameters=True, main_grads=main_grads),
        recomputed=(recompute,) * model.num_layers,
        **more,
    )


def uneven_stages(layers: int, stages: int) -> tuple[int, ...] | None:
    """The layers of each stage, the first ones with one more; None if all have as many."""
    share, rest = divmod(layers, stages)
    return tuple(share + (stage < rest) for stage in range(stages)) if rest else None


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
        rivals = independent_groups_per_node(case_of_row(row, published.vocab_size).plan, cluster)
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
    sizes = (number["hidden"], number["layers"], number["heads"], 50_368, number["seq_len"])
    job = job_of_run(
        model_of(*sizes, **NO_DROPOUT),
        ParallelPlan(sharding=8, sharding_stage=3),
        number["micro"],
        number["accumulate"],
        recompute=row["recompute"],
        main_grads=False,
        flash=True,
    )
    found = step_time(job, Cluster(load_card(row["card"])))
    return found.seconds - found.parts["parameters"] - found.parts["gradients"]


@cache
def ascend_error() -> float:
    """MindSpeed-Core-MS' 39B (38B without its input embedding) on 128 cards 910B, 11.5 s a step: predicted
    over measured seconds, minus 1 (its page on performance tuning)."""
    more = {"num_query_groups": 8, "head_dim": 128, "ffn_hidden_size": 27_648, "sandwich_norm": True}
    model = model_of(6144, 62, 48, 165_664, 4096, **LLAMA, **more, add_bias_linear=False)
    layers = (4,) * 15 + (2,)
    plan = ParallelPlan(dp=4, mp=8, pp=4, virtual_pp_degree=4, pp_layers=layers, sequence_parallel=True)
    job = job_of_run(model, plan, 2, 32, flash=True, kernels="fused")
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
    uneven = uneven_stages(int(row["layers"]), int(row["pp"]))
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
    sizes = (number["hidden"], number["layers"], number["heads"], vocab_size, SEQ_LEN)
    plan = ParallelPlan(
        dp=number["dp"],
        mp=number["mp"],
        pp=number["pp"],
        virtual_pp_degree=number["vpp"],
        sequence_parallel=bool(number["sp"]),
    )
    return job_of_run(
        model_of(*sizes, attention_kernel="reference"),
        plan,
        number["micro"],
        number["batch"] // (number["micro"] * number["dp"]),
        recompute=row["recompute"],
        dtype="float16",
        main_grads=False,
        kernels="fused",
    )


_model = partial(model_of, attention_kernel="reference")

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
        layers, pp = number["layers"], number["pp"]
        uneven = uneven_stages(layers, pp)
        job = job_of_run(
            _model(number["hidden"], layers, 64, 250_880, SEQ_LEN),
            ParallelPlan(sharding=number["dp"], mp=number["mp"], pp=pp, pp_layers=uneven),
            number["micro"],
            2048 // (number["dp"] * number["micro"]),
            recompute="full",
            main_grads=number["gradient_bytes"] == 4,
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
        more = {**LLAMA, "ffn_hidden_size": int(row["ffn"]), "tie_word_embeddings": row["tied"] == "1"}
        model = model_of(hidden, layers, 32, 131_072, 4096, **more)
        replicas, zero = int(row["dp"]), row["zero"] == "1"
        plan = ParallelPlan(
            dp=1 if zero else replicas,
            sharding=replicas if zero else 1,
            mp=int(row["mp"]),
            pp=pp,
            sequence_parallel=row["mp"] != "1",
        )
        job = job_of_run(
            model,
            plan,
            int(row["micro"]),
            int(row["accumulate"]),
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
        job = job_of_run(
            _model(hidden, 24, 16, 50_304, 1024),
            ParallelPlan(),
            8,
            2,
            recompute=recompute,
            dtype="float16",
            main_grads=False,
            kernels="fused",
        )
        found.append(PublishedMemory(name, stage_memory(job, cluster, 0).total / GIB, measured))
    return found


_H100_BITS_PER_SECOND = 3200e9
"""Of a node's network."""


@dataclass(frozen=True)
class PublishedMixture:
    """A run in bfloat16 with balanced experts and nothing recomputed; its speed is given in one of two ways.

    Attributes:
        name: the model.
        sizes: of its section ``Model``.
        experts: its section ``Model.moe``.
        plan: the published one; the optimizer's states are sharded over its replicas.
        batch: sequences of a step.
        micro: sequences of a micro batch.
        mfu: model FLOP utilisation.
        tokens_per_second: of one card.
    """

    name: str
    sizes: dict[str, int]
    experts: dict[str, Any]
    plan: ParallelPlan
    batch: int
    micro: int
    mfu: float | None = None
    tokens_per_second: float | None = None

    @cached_property
    def prediction(self) -> Prediction:
        """What the planner says."""
        model = ModelConfig(
            **self.sizes, **LLAMA, max_position_embeddings=4096, add_bias_linear=False, moe=self.experts
        )
        accumulate = self.batch // (self.plan.data_size * self.micro)
        job = job_of_run(model, self.plan, self.micro, accumulate, flash=True, kernels="fused")
        cluster = Cluster(load_card("H100-80GB"), network=_H100_BITS_PER_SECOND / 8, axes=MEGATRON_AXES)
        return Prediction(job, cluster)

    @property
    def error(self) -> float:
        """Predicted over published seconds of a step, minus 1."""
        if self.mfu is not None:
            return self.mfu / self.prediction.mfu - 1
        assert self.tokens_per_second is not None
        return self.tokens_per_second / self._predicted_tokens - 1

    @property
    def row(self) -> str:
        """Of the page's table."""
        if self.mfu is not None:
            speeds = f"{self.mfu:.1%} MFU | {self.prediction.mfu:.1%} MFU"
        else:
            speeds = f"{self.tokens_per_second:,.0f} tokens/s | {self._predicted_tokens:,.0f} tokens/s"
        plan = f"{self.plan}; micro batch {self.micro}"
        return f"| {self.name}, {self.plan.world_size} cards | {plan} | {speeds} | {self.error:+.0%} |"

    @property
    def _predicted_tokens(self) -> float:
        return self.prediction.tokens_per_second / self.plan.world_size


def _sizes(
    hidden: int, layers: int, heads: int, groups: int, head_dim: int, ffn: int, vocab: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": head_dim,
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
    }


_GPT_OSS = _sizes(2880, 36, 64, 8, 64, 2880, 201_088), {"num_experts": 128, "top_k": 4}
_FOUR_STAGES = ParallelPlan(pp=4, sharding=16, ep=8)

MIXTURES = (
    PublishedMixture(
        "Mixtral 8x22B",
        _sizes(6144, 56, 48, 8, 128, 16_384, 32_768),
        {"num_experts": 8, "top_k": 2},
        ParallelPlan(mp=2, pp=8, sharding=8, ep=4, sequence_parallel=True),
        batch=256,
        micro=1,
        mfu=0.463,
    ),
    PublishedMixture(
        "Qwen2-57B-A14B",
        _sizes(3584, 28, 28, 4, 128, 18_944, 151_936),
        {
            "num_experts": 64,
            "top_k": 8,
            "expert_ffn_size": 2560,
            "shared_experts": {"ffn_size": 20_480, "gate": True},
        },
        ParallelPlan(mp=2, pp=4, sharding=8, ep=4, sequence_parallel=True),
        batch=256,
        micro=1,
        mfu=0.353,
    ),
    PublishedMixture("GPT-OSS 120B", *_GPT_OSS, _FOUR_STAGES, batch=512, micro=4, tokens_per_second=5630),
    PublishedMixture("GPT-OSS 120B", *_GPT_OSS, _FOUR_STAGES, batch=1280, micro=1, tokens_per_second=5993),
)
