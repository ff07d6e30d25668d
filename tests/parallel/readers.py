"""In the ranks of a pool: all who read parameters, each right after a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock


def read_after_steps(plan: dict[str, Any], overlaps: bool) -> dict[str, list[float]]:
    """What each reader finds; a broadcast brings nothing to its tensor before somebody waits for it."""
    import paddle
    from paddle import distributed

    from ppfleetx.core.engine.saving import Saver
    from ppfleetx.generation.session import NextTokenModel
    from ppfleetx.utils.hangs.record import RECORD
    from tests.parity.training import VOCAB, build, micro_batches, take_step

    send = distributed.broadcast

    def late(tensor: paddle.Tensor, src: int, group: Any = None, sync_op: bool = True) -> Any:
        arrived = tensor.clone()
        task = send(arrived, src, group=group, sync_op=sync_op)
        is_mine = distributed.get_rank() == src

        def wait() -> None:
            task.wait()
            with paddle.no_grad():
                if not is_mine:
                    paddle.assign(arrived, tensor)

        if sync_op:
            wait()
        return SimpleNamespace(wait=wait)

    def logits(model: Any, batch: dict[str, paddle.Tensor]) -> paddle.Tensor:
        return model(batch["tokens"])

    def total(tensors: Any) -> list[float]:
        return [float(tensor.astype("float64").abs().sum()) for tensor in tensors]

    extra = {"Model.num_layers": 2, "Distributed.sharding.broadcast_overlap": overlaps}
    with paddle.utils.unique_name.guard(), mock.patch.object(distributed, "broadcast", late):
        cfg, ctx, runner = build(plan, 2, "gpt", "adamw", 4, extra)
        batches = micro_batches(9, cfg, ctx)
        saver = SimpleNamespace(_trained_alone=False)
        readers = {
            "parameters": lambda: total(p for _, p in runner.named_parameters()),
            "evaluation": lambda: list(runner.eval_step(batches)),
            "computation": lambda: [float(abs(a).sum()) for a in runner.compute(logits, batches)],
            "checkpoint": lambda: [_sum(s.data) for s in Saver._tensors(saver, runner)],
        }
        if plan.get("sharding_stage", 1) < 3:  # of stage 3 no rank has the values
            readers["generation"] = lambda: total([NextTokenModel(runner.model, VOCAB).head_matrix])
            readers["model"] = lambda: total(runner.model.parameters())
        found = {}
        for step, (name, read) in enumerate(readers.items()):
            take_step(runner, step, cfg, ctx)
            sent = [call for call in RECORD.calls if call.operation == "broadcast"]
            assert sent and all(call.task is not None for call in sent), "the hang report knows them"
            found[name] = read()
        runner.finish_update()
    return found


def _sum(data: Any) -> float:
    return float(abs(data() if callable(data) else data).sum())
