"""In the ranks of a pool: what is reduced between ranks, and sums of few numbers by two ways."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import paddle
from paddle import distributed
from paddle.base import core

from ppfleetx.resilience.flight_recorder import RECORD
from tests.operators.host_syncs import caller

# Ascend's library has sums, products, maxima and minima of whole numbers and of 16 and 32-bit floats.
_TYPES = ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
_MEAN = core.ReduceOp.AVG


@contextlib.contextmanager
def _reductions(found: set[str], refused: set[str]) -> Iterator[None]:
    """Note reductions that are begun within, those that not every library has in ``refused``."""
    original = RECORD.begin

    def begin(operation: str, group: Any, arguments: tuple[Any, ...]) -> Any:
        if "reduce" in operation:
            tensor = next(one for one in arguments if isinstance(one, paddle.Tensor))
            dtype = str(tensor.dtype)[7:]
            is_mean = any(type(one) is type(_MEAN) and one == _MEAN for one in arguments)
            call = f"{operation} of {dtype}{', a mean,' * is_mean} in {caller()}"
            found.add(call)
            if is_mean or dtype not in _TYPES:
                refused.add(call)
        return original(operation, group, arguments)

    with mock.patch.object(RECORD, "begin", begin):
        yield


def of_a_run(plan: dict[str, Any], world_size: int, extra: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Reductions of two steps and an evaluation: all, and those that not every library has."""
    from ppfleetx.compress.in_training import PruningInTraining
    from tests.helpers.low_precision import emulated
    from tests.parity.training import build, micro_batches, take_step

    found: set[str] = set()
    refused: set[str] = set()
    kernels = emulated() if extra.get("Engine.mix_precision.enable") else contextlib.nullcontext()
    with paddle.utils.unique_name.guard(), kernels, _reductions(found, refused):
        cfg, ctx, runner = build(
            plan, world_size, "gpt", "adamw", 4, {"Model.num_layers": 2, **extra}, ["a", "b"]
        )
        pruning = None if cfg.Compress.pruning is None else PruningInTraining(cfg, ctx, runner)
        for step in range(2):
            if pruning is not None:
                pruning.before_step(step)
            batches = micro_batches(step, cfg, ctx)
            for batch in batches:
                batch["source_ids"] = np.arange(len(batch["tokens"])) % 2
            runner.train_step(batches, step=step + 1, lr=1e-3, weight_decay=0.1)
        take_step(runner, 2, cfg, ctx)
        runner.eval_step(micro_batches(3, cfg, ctx))
    return sorted(found), sorted(refused)


def of_scores() -> tuple[list[str], list[str]]:
    """Those of a text that is scored by ranks with other columns of the logits."""
    from ppfleetx.nn.scores import parallel_token_scores
    from tests.distributed.job_cases import context

    group, found, refused = context(mp=2).group_of("mp"), set(), set()
    logits, labels = paddle.ones([3, 2, 4]), paddle.ones([2, 3], "int64")
    with _reductions(found, refused):
        parallel_token_scores(logits, labels, paddle.ones([2, 3]), 8, group)
    return sorted(found), sorted(refused)


def two_ways(degrees: dict[str, int], shape: list[int]) -> tuple[list[float], list[float], list[float]]:
    """Numbers of all sizes, summed over one axis after the other: by the context, and by reductions."""
    from tests.distributed.job_cases import context

    ctx = context(**degrees)
    generator = np.random.default_rng(ctx.rank)
    numbers = generator.standard_normal(shape) * 2.0 ** generator.integers(-30, 30, shape)
    axes = list(degrees)
    reduced = paddle.to_tensor(numbers)
    for axis in axes:
        distributed.all_reduce(reduced, group=ctx.group_of(axis))
    gathered = ctx.sum_tensor_over(axes, paddle.to_tensor(numbers))
    assert gathered.shape == reduced.shape and gathered.dtype == reduced.dtype
    values = ctx.sum_over(axes, *numbers.flatten().tolist())
    return gathered.flatten().tolist(), values, reduced.flatten().tolist()
