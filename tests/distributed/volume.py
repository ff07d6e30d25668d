"""Run in the ranks: bytes that a rank sends in one training step, by parallel axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.planner.measured import batches_of

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "ppfleetx/configs/debug/gpt_nano.yaml"
GLOBAL_BATCH, SEQ_LEN, VOCAB = 8, 64, 512
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQ_LEN,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def settings(overrides: dict[str, Any], micro_batch_size: int) -> list[str]:
    values = {
        "Global.global_batch_size": GLOBAL_BATCH,
        "Global.local_batch_size": "null",
        "Global.micro_batch_size": micro_batch_size,
        "Data.Train.dataset.max_seq_len": SEQ_LEN,
        "Data.Eval.dataset.max_seq_len": SEQ_LEN,
        **{f"Model.{key}": value for key, value in MODEL.items()},
        **overrides,
    }
    return [f"{key}={value}" for key, value in values.items()]


def step(overrides: dict[str, Any], micro_batch_size: int, world: int) -> dict[str, Any]:
    """Bytes sent by this rank in one step on each axis (``dp x sep``: over both at once; ``tied``: between
    the stages that share the embedding; ``job``: among all), and the number of calls."""
    import paddle

    from ppfleetx.config.loader import load_config
    from ppfleetx.core.module.build import build_module
    from ppfleetx.distributed.cpu import backend as cpu_backend
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.parallel.parallelize import parallelize

    cfg = load_config(CONFIG, settings(overrides, micro_batch_size), world_size=world)
    with paddle.utils.unique_name.guard():
        ctx = init_distributed(cfg)
        runner = parallelize(build_module(cfg), cfg, ctx, train=True)
        batches = batches_of(cfg)
        for number in (1, 2):  # in the first step shapes are agreed upon
            cpu_backend.reset_traffic()
            runner.train_step(batches, step=number, lr=1e-4, weight_decay=0.0)
            traffic = cpu_backend.traffic()
    axis_of = {group.id: axis for axis, group in ctx.groups.items()}
    if {"dp", "sep"} <= ctx.groups.keys():
        axis_of[ctx.group_over(("dp", "sep")).id] = "dp x sep"
    sent = dict.fromkeys([*axis_of.values(), "tied", "job"], 0.0)
    for number, group in traffic.items():
        axis = axis_of.get(number, "job" if len(group["ranks"]) == world and number == 0 else "tied")
        sent[axis] += sum(operation["sent"] for operation in group["operations"].values())
    return {
        "sent": sent,
        "calls": {axis_of.get(n, "job"): _calls(group) for n, group in traffic.items()},
        "micro_batches": cfg.batch.accumulate_steps,
        "stage": ctx.rank_on("pp"),
    }


def _calls(group: dict[str, Any]) -> dict[str, int]:
    return {name: operation["calls"] for name, operation in group["operations"].items()}
