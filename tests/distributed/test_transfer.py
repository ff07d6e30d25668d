"""Arrays on their way to a device: one copy for all, and what comes out of it is what went in."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from ppfleetx.distributed import transfer
from ppfleetx.distributed.random import _seed_device

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

    monkeypatch.setattr(transfer, "on_gpu", lambda: True)
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

    pinned = SimpleNamespace(cuda=lambda blocking: "on the device")
    monkeypatch.setattr(paddle, "to_tensor", lambda array, place: pinned)
    monkeypatch.setattr(paddle, "CUDAPinnedPlace", lambda: None)
    monkeypatch.setattr(paddle.device.cuda, "Event", Event)
    monkeypatch.setattr(transfer, "_on_their_way", transfer.deque())
    for _ in range(3):
        assert transfer._queue(np.zeros(1)) == "on the device"
    assert len(transfer._on_their_way) == 3
    events[0].is_done = events[2].is_done = True
    transfer._queue(np.zeros(1))
    assert [event for event, _ in transfer._on_their_way] == events[1:], "in the order of the device"


def test_a_seed_gives_the_same_numbers_as_paddle_seed():
    paddle.seed(7)
    expected = paddle.uniform([4]).numpy()
    _seed_device(7)
    np.testing.assert_array_equal(paddle.uniform([4]).numpy(), expected)
