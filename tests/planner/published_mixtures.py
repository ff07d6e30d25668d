"""Published training speeds of mixtures of experts on H100s, and their runs as cases of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ppfleetx.config.plan import ParallelPlan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.planner.cards import load_card
from ppfleetx.planner.job import Job, Precision
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.prediction import Prediction
from tests.planner.published import MEGATRON_AXES

SEQ_LEN = 4096
_BITS_PER_SECOND = 3200e9
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
            **self.sizes,
            max_position_embeddings=SEQ_LEN,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            hidden_act="swiglu",
            normalization="RMSNorm",
            position_embedding_type="rope",
            tie_word_embeddings=False,
            add_bias_linear=False,
            moe=self.experts,
        )
        job = Job(
            model=model,
            plan=self.plan,
            micro_batch=self.micro,
            accumulate=self.batch // (self.plan.data_size * self.micro),
            seq_len=SEQ_LEN,
            precision=Precision("bfloat16", lowers_parameters=True, main_grads=True),
            recomputed=("none",) * model.num_layers,
            flash=True,
            kernels="fused",
        )
        cluster = Cluster(load_card("H100-80GB"), network=_BITS_PER_SECOND / 8, axes=MEGATRON_AXES)
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
