"""A job that comes to a halt: the ranks' reports say in one sentence who is missing where."""

import re

import pytest

from ppfleetx.resilience.explain import explain
from ppfleetx.resilience.hang_report import read_reports

CASES = "tests.distributed.cpu.hang_cases:"
PATIENCE = 1.0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "stop",
            r"rank 0 waits in all_reduce #\d+ of group 0 \[0, 1\] \(shape \[2, 2\], float32\); rank 1 never "
            r"arrived and wrote no report: its process is stopped \(SIGSTOP or Ctrl-Z\) \(step 3\)",
        ),
        (
            "beside",
            r"rank 1 waits in all_gather #\d+ of group 0 \[0, 1\] .*; rank 0 never arrived: it is in its "
            r"step \(hang_cases\.py:\d+ in _wait_for_ever, in thread first-on-node_0\) \(step 3\)",
        ),
        (
            "order",
            r"rank 0 waits in all_reduce #0 of group (\d+) \[0, 1\] .*, rank 1 waits in all_reduce #0 of "
            r"group (?!\1)\d+ \[0, 1\] .*, so each waits for the other; the last that both called was "
            r"all_reduce #\d+ of group 0 \[0, 1\]; the ranks do not run the same operations in",
        ),
    ],
)
def test_a_halt_is_explained_by_those_that_are_left(pools, tmp_path, kind, said):
    pool = pools(2)
    first = pool.call(CASES + "halt", kind=kind, directory=str(tmp_path), patience=PATIENCE, timeout=10)[0]
    assert first.died  # with exit code 4; what it said is in the file
    sentence = (tmp_path / "summary.txt").read_text()
    assert re.fullmatch(said + ".*\n", sentence), sentence
    reports = read_reports(tmp_path)
    assert explain(reports).sentence == sentence.strip()
    assert [report.rank for report in reports.values()] == ([0] if kind == "stop" else [0, 1])
    if kind == "stop":  # otherwise the other rank may have been killed before it could clear up
        assert list((tmp_path / "local").iterdir()) == [], "copies of the reports are left"
    assert "halt" in (tmp_path / "rank_00000.txt").read_text()


def test_a_rank_that_works_is_waited_for(pools, tmp_path):
    outcomes = pools(2).run(CASES + "halt", kind="slow", directory=str(tmp_path), patience=PATIENCE, slow=2.5)
    assert outcomes == ["went on"] * 2
    assert sorted(read_reports(tmp_path)) == [0, 1]
    assert explain(read_reports(tmp_path)).goes_on == (1,)


def test_calls_are_recorded_with_number_shape_and_peer(pools):
    common = [
        ["all_reduce", 0, [2, 3], -1, True],
        ["all_gather", 1, [4], -1, True],
        ["broadcast", 2, [1], -1, True],
    ]
    assert pools(2).run(CASES + "recorded") == [
        [*common, ["send", 0, [7], 1, True]],
        [*common, ["recv", 0, [7], 0, True]],
    ]
