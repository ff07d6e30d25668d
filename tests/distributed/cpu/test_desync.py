"""What is concluded from the answers of ranks that do not come."""

import threading
from types import SimpleNamespace

import pytest

from ppfleetx.distributed.cpu.peer_status import Inquiry
from ppfleetx.distributed.cpu.wire import OutOfStepError, Signature


@pytest.mark.parametrize("theirs", [Signature(1, 0, 64, -1), Signature(1, 0, 128, -1), None])
def test_a_rank_that_is_slow_is_not_out_of_step(theirs):
    """The answer may come before the messages of the same operation: its sums travel in the background."""
    peer = SimpleNamespace(rank=1, frames_received=3, frames_sent=3, name="rank 1")
    operation = SimpleNamespace(signature=Signature(1, 0, 64, -1), text="all_reduce", missing=lambda: [1])
    inquiry = Inquiry(0, {1: peer}, threading.Condition(), [operation])
    flags = 0 if theirs is None else 1
    inquiry.take_answer(peer, theirs or Signature(0, 0, 0, -1), flags, 3, 3, "no communication")
    if theirs in (None, operation.signature):
        assert inquiry.judge(operation, 0) == 0
    else:
        with pytest.raises(OutOfStepError, match="rank 1 in all_reduce"):
            inquiry.judge(operation, 0)
