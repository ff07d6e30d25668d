"""How a program ends when another process of its job has: one sentence, code 3, in time."""

from __future__ import annotations

import time

import pytest

from ppfleetx.config.errors import PeerEndedError
from ppfleetx.utils import lost_peers
from tests.utils.python import run_python

PROGRAM = """
import sys, time
from ppfleetx.config.errors import PeerEndedError
from ppfleetx.utils import exit_codes, lost_peers

def main():
    how = sys.argv[1]
    lost = PeerEndedError("rank 1 is gone")
    if how == "told":
        raise lost
    if how == "wrapped":
        lost_peers.note_raised(lost)
        raise OSError("(External) Error in backward of GradNodePyLayer: PeerEndedError: rank 1 is gone")
    if how == "another":
        lost_peers.note_raised(lost)
        raise OSError("No space left on device")
    if how == "busy":
        lost_peers.report_lost("rank 1 is gone", lambda: print("goodbye", flush=True))
        time.sleep(60)

exit_codes._GRACE_SECONDS = 0.3
exit_codes.run_tool(main)
"""


@pytest.mark.parametrize("how", ["told", "wrapped"])
def test_the_end_of_a_peer_is_one_sentence(how: str) -> None:
    assert run(how) == (3, "", "error: rank 1 is gone\n")


def test_another_error_keeps_its_traceback() -> None:
    code, _, errors = run("another")
    assert code == 1
    assert errors.endswith("OSError: No space left on device\n")


def test_a_program_that_does_not_notice_is_ended() -> None:
    started = time.monotonic()
    code, output, errors = run("busy")
    assert (code, output) == (3, "goodbye\n")
    assert errors == "error: rank 1 is gone; this rank ended 0.3 s later, in something else\n"
    assert time.monotonic() - started < 20


def test_the_cause_is_found_behind_other_errors() -> None:
    lost = PeerEndedError("rank 1 is gone")
    try:
        try:
            raise lost
        finally:
            raise ValueError("while cleaning up")
    except ValueError as error:
        assert lost_peers.ended_peer_in(error) is lost
    assert lost_peers.ended_peer_in(ValueError("something else")) is None


def run(how: str) -> tuple[int, str, str]:
    done = run_python(PROGRAM, how)
    return done.returncode, done.stdout, done.stderr
