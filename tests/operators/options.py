"""Training options that may add kernels, with the plans they can be used under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ppfleetx.config.parallel_plan import ParallelPlan
from tests.parity.qat import FORMS

Rule = Callable[[ParallelPlan], bool]


def _always(_: ParallelPlan) -> bool:
    return True


@dataclass(frozen=True)
class Option:
    """Keys of the configuration or of the batches.

    Attributes:
        keys: overrides.
        batches: arguments of the batches: several documents in a sequence, sources.
        fits: whether a plan can be used with it.
        models: models of the parity suite that can be used with it.
        level: level of mixed precision, if it needs one.
        meets_plans: whether it is recorded with each plan. Options of one layer are recorded with one
            process only.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    batches: dict[str, bool] = field(default_factory=dict)
    fits: Rule = _always
    models: tuple[str, ...] = ("gpt", "llama")
    level: str = ""
    meets_plans: bool = True


DROPOUT = {"Model.hidden_dropout_prob": 0.1, "Model.attention_probs_dropout_prob": 0.1}
_RECOMPUTE, _LORA = {"Model.use_recompute": True}, {"Model.lora.rank": 4, "Model.lora.dropout": 0.1}
_OVERLAPS = {f"Distributed.sharding.{what}_overlap": False for what in ("reduce", "broadcast")}
_YARN = "{type: yarn, factor: 4.0, original_max_position_embeddings: 8, beta_fast: 2.0}"
_DOCUMENTS = {"documents": True}


def _shares_gradients(plan: ParallelPlan) -> bool:
    return plan.data_size * plan.sep > 1


def _in_turn(plan: ParallelPlan) -> bool:
    return plan.pp > 1 and plan.virtual_pp_degree == 1


OPTIONS: dict[str, Option] = {
    "dropout": Option(DROPOUT),
    "documents": Option(DROPOUT, _DOCUMENTS),
    "sources": Option(batches={"sources": True}),
    "recompute": Option({**_RECOMPUTE, **DROPOUT}),
    "recompute attention": Option({**_RECOMPUTE, "Model.recompute_granularity": "full_attn"}),
    "recompute core": Option({**_RECOMPUTE, "Model.recompute_granularity": "core_attn", **DROPOUT}),
    "lora": Option(_LORA),
    "lora, documents, recompute": Option({**_LORA, **_RECOMPUTE}, _DOCUMENTS),
    "sandwich": Option({"Model.sandwich_norm": True, "Model.hidden_act": "relu2"}),
    "pieces": Option({"Model.loss_chunks": 2}),
    "pieces, documents": Option({"Model.loss_chunks": 2}, _DOCUMENTS),
    "reference": Option({"Model.attention_kernel": "reference", **DROPOUT}),
    "composites": Option({"Model.fused_ops": "none"}),
    "full checks": Option({"Engine.checks": "full"}),
    "sgd": Option({"Optimizer.name": "SGD"}),
    "no clipping": Option({"Optimizer.grad_clip.clip_norm": 0}),
    "16-bit sums": Option({"Engine.mix_precision.main_grad_fp32": False}, level="O2"),
    **{f"QAT, {name}": Option(keys) for name, keys in FORMS.items()},
    "no overlap": Option(_OVERLAPS, fits=_shares_gradients),
    "messages overlap": Option({"Distributed.overlap_p2p_comm": True}, fits=_in_turn),
    "asynchronous all-reduce": Option(
        {"Distributed.mp_async_allreduce": True}, fits=lambda plan: plan.mp > 1 and not plan.sequence_parallel
    ),
    "asynchronous reduce-scatter": Option(
        {"Distributed.sp_async_reduce_scatter": True}, fits=lambda plan: plan.sequence_parallel
    ),
    "all-gather again": Option(
        {"Distributed.sp_async_reduce_scatter": True, "Distributed.recompute_allgather": True},
        fits=lambda plan: plan.sequence_parallel,
    ),
    "gelu exact": Option({"Model.hidden_act": "gelu_exact", "Model.add_qkv_bias": False}, meets_plans=False),
    "quick gelu": Option({"Model.hidden_act": "quick_gelu"}, meets_plans=False),
    "relu": Option({"Model.hidden_act": "relu"}, meets_plans=False),
    "no positions": Option({"Model.position_embedding_type": "none"}, models=("gpt",), meets_plans=False),
    "rope scaling": Option({"Model.rope_scaling": _YARN}, models=("llama",), meets_plans=False),
    "bias of the head": Option({"Model.add_head_bias": True}, models=("llama",), meets_plans=False),
    "static loss scale": Option(
        {"Engine.mix_precision.use_dynamic_loss_scaling": False}, level="O2", meets_plans=False
    ),
}
"""By name."""
