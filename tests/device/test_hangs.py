"""A job that comes to a halt on cards ends within its time-out, and says who is missing where."""

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.device.place import place
from tests.faults.hang_campaign import Case, run_case

pytestmark = pytest.mark.device

TWO = Plan(dp=2)
CASES = [
    Case("stop", TWO, 1, r"rank 0 waits in .*; rank 1 never arrived.*: its process is stopped \(SIGSTOP"),
    Case("data", TWO, 1, r"rank 0 waits in .*; rank 1 never arrived: it is reading data"),
    Case("disk", Plan(mp=2), 0, r"rank 1 waits in .*; rank 0 never arrived: it is saving a checkpoint"),
    Case("importing", TWO, 1, r"rank 0 waits in .*; rank 1 never arrived: it is importing waits_for_a_lock"),
    Case("skipped", TWO, 1, r"rank 0 waits in all_reduce #0 of group \d+ \[0, 1\].*do not run the same"),
    Case("order", TWO, 1, r"rank 0 waits in all_reduce #0 of group (\d+) .*do not run the same"),
]
if place().is_reference:
    CASES.append(Case("endless", TWO, 1, r"ranks 0, 1 wait in all_reduce #\d+ of the dp group .*step 3"))
# A card's rank that is killed cannot be told by the others, who wait in NCCL: their launcher ends them.
KILLED = Case("kill", TWO, 1, "", codes=(3, 137, 247), reported=None)


@pytest.mark.parametrize("case", [*CASES, KILLED], ids=lambda case: case.name)
def test_a_halt_is_told(need_cards, device, record_property, corpus, tmp_path, case):
    need_cards(2)
    found = run_case(case, corpus, tmp_path, device)
    record_property("sentence", found.sentence)
    record_property("seconds", round(found.seconds, 1))
    record_property("exit codes", found.codes)
    assert found.complaints == []
