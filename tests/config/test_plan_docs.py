"""The computed parts of the documentation, and the schedules that docs/parallelism.md draws."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.gen_parallelism_docs import order_of_passes, timetable, zero_bubble_timetable

ROOT = Path(__file__).resolve().parents[2]


PAGES = ["config", "parallelism", "dialect", pytest.param("planner", marks=pytest.mark.slow)]


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_up_to_date(page):
    tool = f"tools/gen_{page}_docs.py"
    done = subprocess.run([sys.executable, tool, "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run {tool}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 1, 2), (4, 1, 8), (4, 2, 8), (3, 4, 6)])
def test_idle_share_is_the_published_one(stages, chunks, micro_batches):
    """(p - 1) / (v m) of the busy time (Narayanan et al., 2021)."""
    table = timetable(stages, chunks, micro_batches)
    length = max(start + (1 if work[0] == "F" else 2) for row in table for start, work in row)
    busy = 3 * chunks * micro_batches
    assert (length - busy) / busy == pytest.approx((stages - 1) / (chunks * micro_batches))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (8, 8), (8, 20)])
def test_zero_bubble_leaves_a_third(stages, micro_batches):
    """(p - 1)(F + B - W) idle on every rank, with F = B = W = 1 (Qi et al., 2023, table 2)."""
    table = zero_bubble_timetable(stages, micro_batches)
    length = max(start + 1 for row in table for start, _ in row)
    assert length - 3 * micro_batches == stages - 1


def test_every_pass_is_run_once():
    for rank in range(4):
        passes = order_of_passes(4, 2, 8, rank)
        expected = {(kind, chunk, m) for kind in "FB" for chunk in (rank, rank + 4) for m in range(8)}
        assert sorted(passes) == sorted(expected)
