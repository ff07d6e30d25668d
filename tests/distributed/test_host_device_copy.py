"""Copies to a device: one copy for all arrays of a batch, with unchanged contents."""

import numpy as np
import paddle
import pytest

from ppfleetx.distributed import host_device_copy
from ppfleetx.resilience.progress import PROGRESS

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
    """The arrays queued for a simulated GPU."""
    arrays = []

    def queue(array):
        arrays.append(array)
        return paddle.to_tensor(array)

    monkeypatch.setattr(host_device_copy, "on_card", lambda: True)
    monkeypatch.setattr(host_device_copy, "_queue", queue)
    return arrays


@pytest.mark.parametrize("views", [True, False])
def test_a_batch_is_one_copy(queued, views):
    """If Paddle has no views, there is one copy per array, also without waiting."""
    before = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": views})
    try:
        tensors = host_device_copy.upload_all(BATCH)
        for name, array in BATCH.items():
            assert tensors[name].is_contiguous()
            np.testing.assert_array_equal(tensors[name].numpy(), array, err_msg=name, strict=True)
    finally:
        paddle.set_flags(before)
    assert len(queued) == (1 if views else len(BATCH))


def test_pinned_memory_stays_until_its_copy_is_done(monkeypatch):
    """Otherwise Paddle would reuse it for the next array before the first was copied."""
    events = []

    class Event:
        def __init__(self):
            self.is_done = False
            events.append(self)

        def record(self):
            pass

        def query(self):
            return self.is_done

    monkeypatch.setattr(host_device_copy, "queue_copy", lambda array: ("on the device", array))
    monkeypatch.setattr(paddle.device, "Event", Event)
    monkeypatch.setattr(host_device_copy, "_on_their_way", host_device_copy.deque())
    for _ in range(3):
        assert host_device_copy._queue(np.zeros(1)) == "on the device"
    assert len(host_device_copy._on_their_way) == 3
    events[0].is_done = events[2].is_done = True
    host_device_copy._queue(np.zeros(1))
    assert [event for event, _ in host_device_copy._on_their_way] == events[1:], "in the order of the device"


class Late:
    """An event that the card reaches after a few queries."""

    def __init__(self):
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 3


def test_a_card_that_comes_from_micro_batch_to_micro_batch_goes_on(monkeypatch):
    """The host has queued all micro batches and waits for the sum; the watchdog must see progress."""
    monkeypatch.setattr(paddle, "get_device", lambda: "npu:0")
    monkeypatch.setattr(host_device_copy, "recorded_event", Late)
    monkeypatch.setattr(host_device_copy, "_begun", host_device_copy.deque())
    seen = []
    monkeypatch.setattr(PROGRESS, "go_on", lambda: seen.append(len(host_device_copy._begun)))
    for _ in range(3):
        host_device_copy.note_micro_batch()
    assert seen == [0, 1, 2], "the host begins them"
    assert host_device_copy.read(paddle.to_tensor([2.0])).tolist() == [2.0]
    assert seen[3:] == [2, 1, 0], "and the card, later"
