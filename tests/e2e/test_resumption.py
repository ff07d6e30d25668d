"""A checkpoint of one plan continues under another as if nothing had happened; ``make parity`` has more."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.e2e.resumption import SOME, TOLERANCE, Resumption
from tests.helpers.ranks import Pools


@pytest.fixture(scope="module")
def resumption(pools: Pools, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumption:
    return Resumption(pools, tmp_path_factory.mktemp("runs"), corpus, steps=4, num_layers=4)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("before", "after"), SOME, ids=str)
def test_another_plan_continues_the_run(resumption: Resumption, before: Plan, after: Plan) -> None:
    assert resumption.difference(before, after) <= TOLERANCE


def test_micro_batch_and_data_ranks_may_change_together(resumption: Resumption) -> None:
    assert resumption.difference(Plan(dp=2), Plan(), micro_batch_sizes=(2, 8)) <= TOLERANCE
