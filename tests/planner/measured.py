"""In the ranks of a pool: what a step really takes, for comparison with what the planner predicts."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "ppfleetx/configs/debug/gpt_nano.yaml"
SEQ_LEN, VOCAB = 128, 1024
SIZES: dict[str, Any] = {
    "Global.global_batch_size": 8,
    "Global.local_batch_size": "null",
    "Global.micro_batch_size": 2,
    "Data.Train.dataset.max_seq_len": SEQ_LEN,
    "Data.Eval.dataset.max_seq_len": SEQ_LEN,
    "Model.vocab_size": VOCAB,
    "Model.hidden_size": 128,
    "Model.num_layers": 4,
    "Model.num_attention_heads": 8,
    "Model.max_position_embeddings": SEQ_LEN,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "Model.position_embedding_type": "rope",
        "Model.num_query_groups": 4,
        "Model.hidden_act": "swiglu",
        "Model.ffn_hidden_size": 384,
        "Model.normalization": "RMSNorm",
        "Model.tie_word_embeddings": "false",
        "Model.add_bias_linear": "false",
        "Model.hidden_dropout_prob": 0.0,
        "Model.attention_probs_dropout_prob": 0.0,
    },
}

FAMILIES["mixed"] = {
    **FAMILIES["llama"],
    "Model.parallel_residual": "true",
    "Model.qk_layernorm": "true",
    "Model.normalization": "LayerNorm",
    "Model.rotary_percent": 0.5,
}


def settings(overrides: dict[str, Any], family: str) -> list[str]:
    """``-o`` of a job."""
    return [f"{key}={value}" for key, value in {**SIZES, **FAMILIES[family], **overrides}.items()]


def memory(overrides: dict[str, Any], family: str, world: int) -> dict[str, Any]:
    """Bytes of parts and the peaks of the start and of one step, by Paddle's statistics of the host's
    allocator."""
    from paddle.base import core

    def now() -> int:
        return core.host_memory_stat_current_value("Allocated", 0)

    gc.collect()
    before = now()
    found = _measure(overrides, family, world, before)
    gc.collect()
    return {**found, "left": now() - before}


def _measure(overrides: dict[str, Any], family: str, world: int, before: int) -> dict[str, Any]:
    from paddle.base import core

    from ppfleetx.optims.gradients import gradient_of

    core.host_memory_stat_reset_peak_value("Allocated", 0)
    runner, cfg, ctx = _runner(overrides, family, world)
    start = core.host_memory_stat_peak_value("Allocated", 0) - before
    batches = batches_of(cfg)
    runner.train_step(batches, step=1, lr=1e-4, weight_decay=0.0)  # the optimizer makes its states
    gc.collect()
    parameters = [p for _, p in runner.named_parameters()]
    states = [tensor for (_, name), tensor in runner.optimizer_state().items() if "pow" not in name]
    found = {"parameters": _bytes(parameters), "states": _bytes(states), "start": start}
    found["stage"] = ctx.rank_on("pp")
    reduce, sync = runner._sync.reduce, runner._sync

    def counting() -> None:
        found["gradients"] = _bytes(g for g in map(gradient_of, sync.parameters) if g is not None)
        reduce()

    sync.reduce = counting
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    runner.train_step(batches, step=2, lr=1e-4, weight_decay=0.0)
    found["peak"] = core.host_memory_stat_peak_value("Allocated", 0) - before
    return found


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.size * tensor.element_size() for tensor in tensors)


def _runner(overrides: dict[str, Any], family: str, world: int) -> tuple[Any, Any, Any]:
    import paddle

    from ppfleetx.config.loader import load_config
    from ppfleetx.core.module.build import build_module
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.parallel.parallelize import parallelize

    cfg = load_config(CONFIG, settings(overrides, family), world_size=world)
    with paddle.utils.unique_name.guard():
        ctx = init_distributed(cfg)
        return parallelize(build_module(cfg), cfg, ctx, train=True), cfg, ctx


def traffic(overrides: dict[str, Any], family: str, world: int) -> dict[str, Any]:
    """Bytes sent by this rank in one step on each axis (``dp x sep``: over both at once; ``tied``: between
    the stages that share the embedding; ``job``: among all), and the number of calls."""
    from ppfleetx.distributed.cpu import backend as cpu_backend

    runner, cfg, ctx = _runner(overrides, family, world)
    for number in (1, 2):  # in the first step shapes are agreed upon
        cpu_backend.reset_traffic()
        runner.train_step(batches_of(cfg), step=number, lr=1e-4, weight_decay=0.0)
    axis_of = {group.id: axis for axis, group in ctx.groups.items()}
    if {"dp", "sep"} <= ctx.groups.keys():
        axis_of[ctx.group_over(("dp", "sep")).id] = "dp x sep"
    sent, calls = dict.fromkeys([*axis_of.values(), "tied", "job"], 0.0), {}
    for number, group in cpu_backend.traffic().items():
        axis = axis_of.get(number, "job" if len(group["ranks"]) == world and number == 0 else "tied")
        sent[axis] += sum(operation["sent"] for operation in group["operations"].values())
        calls[axis] = {name: operation["calls"] for name, operation in group["operations"].items()}
    micro_batches = cfg.batch.accumulate_steps
    return {"sent": sent, "calls": calls, "micro_batches": micro_batches, "stage": ctx.rank_on("pp")}


def batches_of(cfg: Any) -> list[dict[str, np.ndarray]]:
    """The micro batches of a step, of random tokens."""
    size, length = cfg.batch.micro_batch_size, cfg.Data.Train.dataset.max_seq_len
    tokens = np.random.default_rng(0).integers(0, cfg.Model.vocab_size, (size, length + 1))
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": np.ones((size, length), np.float32),
        "position_ids": np.tile(np.arange(length), (size, 1)),
    }
    return [batch] * cfg.batch.accumulate_steps
