"""Run in the ranks for test_coordination.py and test_consistency_checks.py."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from ppfleetx.config.batch_sizes import BatchPlan
from ppfleetx.config.errors import DataError, PeerEndedError, UserError
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.distributed import consistency_checks, coordination


def context(**degrees: Any):
    from ppfleetx.distributed.init import start_fleet

    plan = ParallelPlan(**degrees)
    batch = BatchPlan(global_batch_size=8, local_batch_size=8, micro_batch_size=8, accumulate_steps=1)
    return start_fleet(plan, batch, "cpu")


def told(act) -> str:
    """The UserError that ``act`` raises, or "nothing"."""
    try:
        act()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def gathered() -> list:
    ctx = context(dp=2)
    value = {"rank": ctx.rank, "text": "é" * (1 + 100 * ctx.rank)}
    return [coordination.gather(ctx, value), coordination.gather_numbers(ctx, [ctx.rank, 2**40]).tolist()]


def mistake(failing: list[int], name_ranks: bool, with_defect: int | None = None) -> str:
    """The ranks ``failing`` make a user's mistake; the rank ``with_defect`` has another error."""
    ctx = context(dp=3)
    try:
        with coordination.joint_errors(ctx, name_ranks=name_ranks):
            if ctx.rank == with_defect:
                raise TypeError("a defect")
            if ctx.rank in failing:
                raise DataError("no such corpus")
    except (UserError, TypeError, PeerEndedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def in_turns(directory: str, first_fails: bool, seconds: float = 0.3) -> list:
    """Rank 0 is the first of its node and slow; the others must find its file."""
    ctx = context(dp=3)
    os.environ["PADDLE_LOCAL_RANK"] = str(ctx.rank)
    cache = Path(directory) / "cache"

    def make() -> str:
        if ctx.rank == 0:
            time.sleep(seconds)
            if first_fails:
                raise DataError("no such corpus")
            assert not cache.exists()
            cache.write_text("made by rank 0")
        return cache.read_text()

    result = []
    message = told(lambda: result.append(coordination.first_on_each_node(ctx, make)))
    return [message, result]


def configurations(differ: bool) -> str:
    ctx = context(dp=2)
    values = {"Model.num_layers": 2 + (ctx.rank if differ else 0), "Global.seed": 1}
    return told(lambda: consistency_checks.check_same_configuration(ctx, values))


def operators(options: list[str], missing: dict[str, list[int]]) -> str:
    """Compare what the ranks compute with; ``missing`` says which ranks lack an operator library."""
    from ppfleetx.core.engine.rank_consistency import check_configuration
    from ppfleetx.nn.cpu_ops import bfloat16, ops
    from ppfleetx.utils import device_support

    ctx = context(dp=3)
    cfg = load_config("ppfleetx/configs/debug/gpt_nano.yaml", options)
    with ExitStack() as stack:
        for module, name in ((ops, "ops"), (bfloat16, "bfloat16")):
            has = ctx.rank not in missing.get(name, ())
            stack.enter_context(mock.patch.object(module, "are_available", lambda has=has: has))
        stack.enter_context(mock.patch.object(device_support, "read_cpuinfo", lambda: "flags : avx512_bf16"))
        return told(lambda: check_configuration(cfg, ctx))


def copies(degrees: dict[str, int], spoilt_rank: int | None, offset_by_rank: bool) -> str:
    """Check a weight that has either the same slice on all ranks, or a different slice on each."""
    import paddle

    ctx = context(**degrees)
    value = np.ones(4, np.float32)
    if ctx.rank == spoilt_rank:
        value[2] = np.nextafter(value[2], 2, dtype=np.float32)
    info = SimpleNamespace(offset=(4 * ctx.rank if offset_by_rank else 0,))
    return told(lambda: consistency_checks.check_replicas(ctx, [("weight", paddle.to_tensor(value), info)]))


def batches(degrees: dict[str, int], readers: list[int], kind: str) -> str:
    """Rank r reads batch ``readers[r]``."""
    ctx = context(**degrees)
    ids = np.arange(4) + 4 * readers[ctx.rank]
    batch = [{"sample_ids": ids, "tokens": np.tile(ids[:, None], (1, 8))}]
    if kind == "samples":
        return told(lambda: consistency_checks.check_samples(ctx, ids))
    digests = coordination.gather_numbers(ctx, [consistency_checks.batch_digest(batch)])[:, 0].tolist()
    return told(lambda: consistency_checks.check_batches(ctx, digests, distinct=True))


def saved_in_the_background(directory: str, seconds: float) -> list:
    """The last rank takes this long to write. Return the messages of the ranks when the save ends."""
    from ppfleetx.checkpoint import storage
    from ppfleetx.checkpoint.manager import BackgroundManager
    from tests.checkpoint.checkpoints import slices

    ctx, write = context(mp=2), storage.write_safetensors

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return write(*arguments)

    storage.write_safetensors = slow if ctx.rank == 1 else write
    try:
        manager = BackgroundManager(directory, ctx=ctx)
        tensors = list(slices())
        manager.save(epoch=0, step=1, tensors=tensors[ctx.rank :: 2], state={"step": 1})
        path = manager.wait()
    finally:
        storage.write_safetensors = write
    return [path is not None, manager.wait()]
