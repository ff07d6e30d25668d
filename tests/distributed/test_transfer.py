"""Arrays on their way to a device: one copy for all, and what comes out of it is what went in."""

import numpy as np
import paddle
import pytest

from ppfleetx.distributed import transfer
from ppfleetx.resilience.heartbeat import PROGRESS

BATCH = {
    "tokens": np.arange(6).reshape(2, 3),
    "loss_mask": np.array([[1.0, 0.5, 0.25], [0.0, 1.0, 1.0]], np.float32),
    "document_start": np.array([[0, 0, 2], [0, 1, 1]], np.int32),
    "flags": np.array([True, False, True]),
    "cut": np.arange(24, dtype=np.float32).reshape(4, 6)[1:3, ::2],
    "one": np.array(7),
}


@pytest.fixture
def queued(monkeypatch):
    """Arrays that are queued, on what pretends to be a GPU."""
    arrays = []

    def queue(array):
        arrays.append(array)
        return paddle.to_tensor(array)

    monkeypatch.setattr(transfer, "on_card", lambda: True)
    monkeypatch.setattr(transfer, "_queue", queue)
    return arrays


@pytest.mark.parametrize("views", [True, False])
def test_a_batch_is_one_copy(queued, views):
    """Without views of memory there is one copy an array, and nobody waits for those either."""
    before = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": views})
    try:
        tensors = transfer.upload_all(BATCH)
        for name, array in BATCH.items():
            assert tensors[name].is_contiguous()
            np.testing.assert_array_equal(tensors[name].numpy(), array, err_msg=name, strict=True)
    finally:
        paddle.set_flags(before)
    assert len(queued) == (1 if views else len(BATCH))


def test_pinned_memory_stays_until_its_copy_is_done(monkeypatch):
    """Paddle would give it to the next array, which the host writes while the first is still to be read."""
    events = []

    class Event:
        def __init__(self):
            self.is_done = False
            events.append(self)

        def record(self):
            pass

        def query(self):
            return self.is_done

    monkeypatch.setattr(transfer, "queue_copy", lambda array: ("on the device", array))
    monkeypatch.setattr(paddle.device, "Event", Event)
    monkeypatch.setattr(transfer, "_on_their_way", transfer.deque())
    for _ in range(3):
        assert transfer._queue(np.zeros(1)) == "on the device"
    assert len(transfer._on_their_way) == 3
    events[0].is_done = events[2].is_done = True
    transfer._queue(np.zeros(1))
    assert [event for event, _ in transfer._on_their_way] == events[1:], "in the order of the device"


class Late:
    """An event of a card that comes to it when it has been asked a few times."""

    def __init__(self):
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 3


def test_a_card_that_comes_from_micro_batch_to_micro_batch_goes_on(monkeypatch):
    """The host has queued all of them, and waits for the sum; the watch sees this process in its step."""
    monkeypatch.setattr(paddle, "get_device", lambda: "npu:0")
    monkeypatch.setattr(transfer, "recorded_event", Late)
    monkeypatch.setattr(transfer, "_begun", transfer.deque())
    seen = []
    monkeypatch.setattr(PROGRESS, "go_on", lambda: seen.append(len(transfer._begun)))
    for _ in range(3):
        transfer.note_micro_batch()
    assert seen == [0, 1, 2], "the host begins them"
    assert transfer.read(paddle.to_tensor([2.0])).tolist() == [2.0]
    assert seen[3:] == [2, 1, 0], "and the card, later"
