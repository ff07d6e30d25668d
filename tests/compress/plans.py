"""In the ranks of a pool (tests/helpers/ranks.py): the loss and text of quantized models, and a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def use(config: str, plan: Sequence[str], world: int, generate: bool) -> dict[str, Any]:
    """In a rank: the loss of some tokens, and greedy continuations where the plan can generate."""
    import paddle

    from ppfleetx.commands.generate import load_generator
    from ppfleetx.commands.train import build_runner, find_weights
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.distributed.init import init_distributed

    cfg = load_config(config, [*plan, "Generation.decode_strategy=greedy_search"], world_size=world)
    ctx = ParallelContext.single() if world == 1 else init_distributed(cfg)
    with paddle.utils.unique_name.guard():
        start = find_weights(cfg, ctx)
        runner = build_runner(cfg, ctx, train=False)
        start.restore_weights(runner, cfg.Model)
        total, count, _ = runner.eval_step([_rows(0, 2)])
        ids = []
        if generate:
            generator = load_generator(cfg, ctx)
            results = generator.generate(["the cat", "and"], cfg.Generation)
            ids = [list(one[0].ids) for one in results]
    return {"loss": total / count if count else None, "ids": ids}


def _rows(first: int, last: int) -> dict[str, np.ndarray]:
    """Some rows of a batch of 4."""
    tokens = np.random.default_rng(7).integers(0, 300, (4, 33))[first:last]
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": np.tile(np.arange(32), (last - first, 1)),
        "loss_mask": np.ones((last - first, 32), np.float32),
    }


def adapt(config: str, plan: Sequence[str], world: int) -> list[float]:
    """In a rank: the losses of four steps of training adapters beside quantized weights."""
    import paddle

    from ppfleetx.commands.train import build_runner
    from ppfleetx.config.loader import load_config
    from ppfleetx.core.engine.restore import find_start
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.distributed.init import init_distributed

    options = ["Model.lora.rank=4", "Global.global_batch_size=4", "Global.local_batch_size=null"]
    options += ["Global.micro_batch_size=1", "Optimizer.name=SGD"]
    options += ["Model.hidden_dropout_prob=0.0", "Model.attention_probs_dropout_prob=0.0"]
    cfg = load_config(config, [*options, *plan], world_size=world)
    ctx = ParallelContext.single() if world == 1 else init_distributed(cfg)
    size, first = cfg.batch.local_batch_size, ctx.data_rank * cfg.batch.local_batch_size
    rows = [_rows(row, row + 1) for row in range(first, first + size)]
    with paddle.utils.unique_name.guard():
        runner = build_runner(cfg, ctx, train=True)
        find_start(cfg.Engine.save_load, Path(config).parent, ctx).restore(runner, None, {}, cfg)
        before = {name: p.numpy() for name, p in runner.named_parameters() if ".lora." not in name}
        steps = [runner.train_step(rows, step=step, lr=0.5, weight_decay=0.0) for step in range(4)]
        held = dict(runner.named_parameters())
        assert all((held[name].numpy() == values).all() for name, values in before.items())
    return [step.loss for step in steps]


def save_teacher(place: str) -> None:
    """Write a checkpoint of a model that was only begun: half as deep and twice as wide as the students."""
    import paddle

    from ppfleetx.checkpoint.manager import CheckpointManager
    from ppfleetx.checkpoint.state_dict import model_slices
    from tests.parity.training import VOCAB, build

    sizes = {"Model.num_layers": 2, "Model.hidden_size": 64, "Global.seed": 7}
    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build({}, 1, "gpt", "sgd", 8, sizes)
        manager = CheckpointManager(place, ctx=ctx, vocab_size=VOCAB, config=cfg.model_dump(mode="json"))
        manager.save(epoch=0, step=1, tensors=list(model_slices(runner.named_parameters())), state={})
