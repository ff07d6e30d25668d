"""``Engine.checks`` in the whole program: a fault is found in time by every rank, or with ``off`` never."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.nn.cpu_ops import ops
from tests.e2e.program import losses, values_of
from tests.helpers.ranks import Pools

CALLED = "tests.e2e.program:train"


def run(
    pools: Pools, corpus: Path, output_dir: Path, plan: Plan, checks: str, fault: str, **engine: int
) -> str:
    """Train four steps with ``fault``; what the ranks, all with the same words, ended with."""
    small = {"Engine.max_steps": 4, "Engine.checks": checks, "Model.num_layers": 2}
    small |= {f"Engine.{key}": value for key, value in engine.items()}
    values = values_of(plan, corpus, output_dir, overrides=small)
    message = pools(plan.world_size).run(CALLED, values=values, world=plan.world_size, fault=fault)
    assert len(set(message)) == 1, message
    return message[0]


@pytest.mark.parametrize(("checks", "steps"), [("off", 4), ("cheap", 3), ("full", 1)])
def test_replicas_that_differ(pools: Pools, corpus: Path, tmp_path: Path, checks: str, steps: int) -> None:
    """``full`` finds it after the step, ``cheap`` before the checkpoint of step 3 is written."""
    message = run(pools, corpus, tmp_path, Plan(dp=2), checks, "one_bit")
    assert ("decoder.final_norm.weight on ranks 0 and 1" in message) == (checks != "off")
    assert len(losses(tmp_path)) == steps
    assert (tmp_path / "epoch_0_step_3").exists() == (checks == "off")


@pytest.mark.parametrize("checks", ["off", "cheap", "full"])
def test_numbers_that_are_not_finite(pools: Pools, corpus: Path, tmp_path: Path, checks: str) -> None:
    message = run(pools, corpus, tmp_path, Plan(pp=2), checks, "nan")
    if checks == "off":
        assert message == ""
        assert len(losses(tmp_path)) == 4
    else:
        # Paddle's cross entropy on the CPU gives a finite loss for logits of NaN; ours does not.
        what = "loss" if ops.are_available() else "gradient norm"
        assert f"global step 2: {what} is nan; nothing was updated" in message
        assert "on rank 1 in micro batch 0" in message
        assert "whose parameter decoder.final_norm.weight is not finite" in message
        assert "positions in the training order: [16, 17, 18, 19]" in message
        assert len(losses(tmp_path)) == 1


@pytest.mark.parametrize("checks", ["off", "cheap"])
def test_data_ranks_that_read_the_same(pools: Pools, corpus: Path, tmp_path: Path, checks: str) -> None:
    message = run(pools, corpus, tmp_path, Plan(dp=2), checks, "same_data_rank")
    assert ("ranks 0 and 1 are data ranks 0 and 1 but read the same batch" in message) == (checks == "cheap")


def test_an_evaluation_that_one_rank_cannot_read_ends_all(pools, corpus: Path, tmp_path: Path) -> None:
    message = run(pools, corpus, tmp_path, Plan(dp=2), "cheap", "bad_evaluation", eval_freq=2)
    assert message == "rank 1: a document holds id 99999"
    assert len(losses(tmp_path)) == 2
