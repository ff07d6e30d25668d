"""Ranks reduce only types that every collective library supports, and sums have the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import distributed
from paddle.base import core

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.resilience.flight_recorder import RECORD
from tests.operators.host_syncs import caller

HERE = "tests.parallel.test_reductions:"
HALF = {"Engine.mix_precision.enable": True, "Engine.mix_precision.dtype": "float16"}
QUANTIZED = {
    "Compress.Quantization.enable": True,
    "Compress.Quantization.activation_quantize_type": "moving_average_abs_max",
}
ON_CPUS_ALONE = "all_reduce of float64 in nn/loss.py:_parallel_entropy"
"""Of an evaluation: on a card the same sum is one of float32."""
PRUNED = {"Compress.Prune.enable": True, "Compress.Prune.ratio": 0.5, "Compress.Prune.begin_step": 0}


@pytest.mark.slow_after(5)
@pytest.mark.parametrize(
    ("plan", "extra"),
    [
        (Plan(dp=2), {}),
        (Plan(dp=2), HALF),
        (Plan(mp=2), {}),
        (Plan(mp=2), {**HALF, "Engine.mix_precision.level": "O2"}),
        (Plan(mp=2), QUANTIZED),
        (Plan(mp=2), PRUNED),
        (Plan(mp=2, sequence_parallel=True), {}),
        (Plan(pp=2), {}),
        (Plan(sep=2), {}),
        (Plan(sharding=2), {}),
        (Plan(sharding=2, sharding_stage=2), {"Distributed.sharding.reduce_overlap": False}),
        (Plan(sharding=2, sharding_stage=3), {}),
    ],
    ids=str,
)
def test_a_run_reduces_what_every_library_can(comparison, plan, extra):
    for found, refused in comparison.pools.run(plan, HERE + "of_a_run", extra=extra):
        assert set(refused) <= {ON_CPUS_ALONE}
        assert found or plan.pp == 2, "nothing is noted"


def test_scores_reduce_what_every_library_can(comparison):
    assert [refused for _, refused in comparison.pools(2).run(HERE + "of_scores")] == [[], []]


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 4}, {"mp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("shape", [[], [3, 5]], ids=["scalar", "several"])
def test_sums_have_the_bits_of_a_reduction(comparison, degrees, shape):
    """Numbers of any size are added in rank order, and all ranks have the same result."""
    size = 4 if 4 in degrees.values() or len(degrees) > 1 else 2
    results = comparison.pools(size).run(HERE + "two_ways", degrees=degrees, shape=shape)
    for gathered, values, reduced in results:
        assert gathered == values == reduced
        assert gathered == results[0][0]


# -- in the ranks

# Ascend's library has sums, products, maxima and minima of whole numbers and of 16 and 32-bit floats.
_TYPES = ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
_MEAN = core.ReduceOp.AVG


@contextlib.contextmanager
def _reductions(found: set[str], refused: set[str]) -> Iterator[None]:
    """Record all reductions in the context; those that some library lacks are in ``refused``."""
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
    from ppfleetx.compress.prune_in_training import PruningInTraining
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
    """The reductions of scoring a text, with columns of the logits divided over ranks."""
    from ppfleetx.nn.loss import token_scores
    from tests.distributed.job_cases import context

    group, found, refused = context(mp=2).group_of("mp"), set(), set()
    logits, labels = paddle.ones([3, 2, 4]), paddle.ones([2, 3], "int64")
    with _reductions(found, refused):
        token_scores(logits, labels, paddle.ones([2, 3]), 8, group)
    return sorted(found), sorted(refused)


def two_ways(degrees: dict[str, int], shape: list[int]) -> tuple[list[float], list[float], list[float]]:
    """Sums of numbers of all sizes over one axis after the other: by the context, and by reductions."""
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
