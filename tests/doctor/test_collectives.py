"""Every operation in every group, on four ranks; a rank that sums wrongly is found."""

from __future__ import annotations

from ppfleetx.doctor.check import Row, Status, ok
from ppfleetx.doctor.run import slowest


def test_every_operation_in_every_group_is_right_and_a_wrong_sum_is_found(pools):
    pool = pools(4)
    rows = [
        [Row.from_json(row) for row in own] for own in pool.run("tests.doctor.rank_cases:collectives", mp=2)
    ]
    titles = [row.name for row in rows[0]]
    assert len(titles) == len(set(titles)) == 31  # six operations; the job, dp, mp, ep, emp
    assert "uneven all_to_all (ep)" in titles
    assert {row.status for own in rows for row in own} == {Status.OK}
    assert all(row.numbers["bytes_per_second_4096"] > 0 for row in rows[3])
    told = pool.run("tests.doctor.rank_cases:collectives", mp=2, fault=3)
    failed = [(rank, row["name"]) for rank, own in enumerate(told) for row in own if row["status"] == "fail"]
    assert failed == [(3, f"all_reduce ({group})") for group in ("job", "dp", "mp", "ep", "emp")]
    (row, *_) = [row for row in told[3] if row["status"] == "fail"]
    assert "numbers are wrong; number 0 is" in row["found"] and "NCCL_DEBUG" in row["cure"]


def test_the_slowest_rank_speaks_for_a_collective():
    def measured(speed: float) -> Row:
        return Row.from_json({**ok("all_reduce (dp)", f"{speed}", b=speed).as_json(), "group": "collectives"})

    rest, rows = slowest([[measured(3.0), ok("other", "x")], [measured(1.0)], [measured(2.0)]])
    assert [len(own) for own in rest] == [1, 0, 0]
    assert [row.found for row in rows] == ["1.0 (slowest: rank 1)"]
