"""Every operation in every group, on four ranks; a rank that sums wrongly is found."""

from __future__ import annotations

import tracemalloc
from typing import Any
from unittest import mock

import numpy as np

from ppfleetx.doctor.results import Row, Status, ok
from ppfleetx.doctor.run import split_slowest


def test_every_operation_in_every_group_is_right_and_a_wrong_sum_is_found(pools):
    pool = pools(4)
    rows = [
        [Row.from_json(row) for row in own]
        for own in pool.run("tests.doctor.test_collectives:collectives", mp=2)
    ]
    titles = [row.name for row in rows[0]]
    assert len(titles) == len(set(titles)) == 31  # six operations; the job, dp, mp, ep, emp
    assert "uneven all_to_all (ep)" in titles
    assert {row.status for own in rows for row in own} == {Status.OK}
    assert all(row.numbers["bytes_per_second_4096"] > 0 for row in rows[3])
    told = pool.run("tests.doctor.test_collectives:collectives", mp=2, fault=3)
    failed = [(rank, row["name"]) for rank, own in enumerate(told) for row in own if row["status"] == "fail"]
    assert failed == [(3, f"all_reduce ({group})") for group in ("job", "dp", "mp", "ep", "emp")]
    (row, *_) = [row for row in told[3] if row["status"] == "fail"]
    assert "numbers are wrong; number 0 is" in row["found"] and "NCCL_DEBUG" in row["cure"]


def test_a_thousand_ranks_need_little_memory_and_have_exact_sums():
    from ppfleetx.doctor.collectives import OPERATIONS, Member, inputs_of

    count, size = 1024, 1024
    tracemalloc.start()
    inputs = inputs_of(count, size)
    expected = OPERATIONS["all_reduce"][1](Member("job", None, range(size), 0), inputs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    partial = np.cumsum(inputs, axis=0)
    assert np.array_equal(partial[-1], expected) and expected.any()
    assert np.abs(partial).max() <= 256  # bfloat16 has all integers up to here


def test_the_slowest_rank_speaks_for_a_collective():
    def measured(speed: float) -> Row:
        return Row.from_json({**ok("all_reduce (dp)", f"{speed}", b=speed).as_json(), "group": "collectives"})

    rest, rows = split_slowest([[measured(3.0), ok("other", "x")], [measured(1.0)], [measured(2.0)]])
    assert [len(own) for own in rest] == [1, 0, 0]
    assert [row.found for row in rows] == ["1.0 (slowest: rank 1)"]


# -- in the ranks


def collectives(mp: int, fault: int | None = None) -> list[dict[str, Any]]:
    """Rows of all operations in the groups of a plan; the rank ``fault`` adds one to what it has summed."""
    from paddle import distributed

    from ppfleetx.config.sections.moe import MoEConfig
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.doctor.collectives import examine_groups
    from ppfleetx.doctor.results import Target
    from ppfleetx.doctor.run import plan_config

    size = distributed.ParallelEnv().world_size
    cfg = plan_config(Target(world_size=size))
    cfg = cfg.changed("Distributed", mp_degree=mp, dp_degree=size // mp, ep_degree=size // mp)
    cfg = cfg.changed("Model", moe=MoEConfig(num_experts=size))
    ctx = init_distributed(cfg)
    right = distributed.all_reduce

    def wrong(tensor: Any, *arguments: Any, **options: Any) -> Any:
        task = right(tensor, *arguments, **options)
        tensor[0] += 1
        return task

    with mock.patch.object(distributed, "all_reduce", wrong if ctx.rank == fault else right):
        return [row.as_json() for row in examine_groups(ctx, lambda what: None, (256, 4096))]
