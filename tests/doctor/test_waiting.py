"""How long the launcher waits for the ranks that have not reported."""

import os
import signal

import pytest

from ppfleetx.doctor import launch
from ppfleetx.doctor.check import fail
from ppfleetx.doctor.run import ALONE


@pytest.mark.parametrize(("name", "code"), [(ALONE, 0), ("first rank", signal.SIGTERM)])
def test_a_rank_that_did_not_meet_the_first_one_lets_it_look_on(monkeypatch, tmp_path, name, code):
    monkeypatch.setattr(launch, "_END_SECONDS", 0.2)
    launch.leave_report([fail(name, "is gone", "")], 2, str(tmp_path), 1)
    with (tmp_path / "log").open("wb") as log:
        assert launch._run(["sleep", "3"], dict(os.environ), log.fileno(), 60.0, tmp_path) == code


def test_a_rank_that_never_ends_is_not_waited_for_once_the_first_has_looked(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "_END_SECONDS", 0.2)
    launch.leave_report([fail(ALONE, "rank 1 did not come", "")], 2, str(tmp_path), 0)
    with (tmp_path / "log").open("wb") as log:
        assert launch._run(["sleep", "60"], dict(os.environ), log.fileno(), 60.0, tmp_path) == signal.SIGTERM
