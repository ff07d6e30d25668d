"""Saving in the background: the same bytes, of the moment `save` was called, and errors told later."""

import errno
import os
import threading
from concurrent.futures import wait as wait_for
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.base import core

from ppfleetx.checkpoint import storage
from ppfleetx.checkpoint.manager import BackgroundManager, CheckpointManager, HostCopier
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint
from ppfleetx.checkpoint.state_dict import model_slices
from ppfleetx.config.errors import CheckpointError
from ppfleetx.distributed import host_device_copy
from ppfleetx.nn.init import Constant
from ppfleetx.nn.param_spec import ParamInfo
from tests.checkpoint.checkpoints import slices


def live(seed=0):
    return [replace(piece, changes_with_update=True) for piece in slices(seed)]


def save(manager, step, tensors=None):
    return manager.save(epoch=0, step=step, tensors=tensors or live(step), state={"step": step})


@pytest.fixture
def held_back(monkeypatch):
    """Nothing is written until this event is set."""
    go, write = threading.Event(), storage.write_safetensors

    def late(*arguments):
        assert go.wait(30)
        return write(*arguments)

    monkeypatch.setattr(storage, "write_safetensors", late)
    yield go
    go.set()


def contents(directory):
    """Every file but the marker and `latest`, which hold the time."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path.relative_to(directory): path.read_bytes() for path in files if path.name != "COMPLETE"}


def test_the_bytes_are_those_of_a_save_in_the_foreground(tmp_path):
    description = {"config": {"Model": {}}, "vocab_size": 11}
    there = CheckpointManager(tmp_path / "fore", **description)
    here = BackgroundManager(tmp_path / "back", **description)
    for step in (1, 2):
        path = save(here, step)
        assert here.wait() == path and here.wait() is None and here.poll() is None
        assert contents(path) == contents(save(there, step))
    assert resolve_checkpoint(tmp_path / "back", verify=True) == path


def test_what_is_saved_is_of_the_moment_of_the_call(tmp_path, held_back):
    manager, tensors = BackgroundManager(tmp_path), live(1)
    before = [piece.array().copy() for piece in tensors]
    path = save(manager, 1, tensors)
    manager.wait_for_copy()
    for piece in tensors:
        piece.data[...] = 7
    assert manager.poll() is None and not path.exists()
    held_back.set()
    manager.wait()
    opened = open_checkpoint(path)
    for piece, array in zip(tensors, before, strict=True):
        assert np.array_equal(opened.read(piece.name, piece.kind, piece.state), array)


def test_what_lies_on_a_device_is_fetched_behind_its_work(tmp_path, monkeypatch):
    """`save` queues the copies, training goes on, and the thread alone waits until they are there."""
    is_done, reads, read = threading.Event(), [], paddle.Tensor.numpy

    def noted(tensor):
        reads.append((threading.current_thread().name, is_done.is_set()))
        return read(tensor)

    monkeypatch.setattr(core.Place, "is_cpu_place", lambda _: False)
    monkeypatch.setattr(host_device_copy, "on_card", lambda: True)
    monkeypatch.setattr(host_device_copy, "recorded_event", lambda: SimpleNamespace(query=is_done.is_set))
    monkeypatch.setattr(paddle.Tensor, "numpy", noted)
    named = [("a", paddle.arange(6, dtype="float32")), ("b", paddle.ones([2, 3], "bfloat16"))]
    for name, tensor in named:
        shape = tuple(tensor.shape)
        tensor.info = ParamInfo(name, shape, (0,) * len(shape), shape, Constant(), "matrix")
    manager = BackgroundManager(tmp_path)
    path = save(manager, 1, list(model_slices(named)))
    manager.wait_for_copy()
    for _, tensor in named:
        tensor.fill_(7)  # a device does this behind the copy
    assert reads == [] and manager.poll() is None
    is_done.set()
    assert manager.wait() == path
    assert set(reads) == {("checkpoint", True)}
    opened = open_checkpoint(path)
    assert np.array_equal(opened.read("a", "model", ""), np.arange(6))
    assert np.array_equal(opened.read("b", "model", ""), np.full([2, 3], 0x3F80))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_an_error_is_told_by_the_next_poll_and_harms_nothing(tmp_path, monkeypatch, number):
    manager = BackgroundManager(tmp_path)
    save(manager, 1)
    first = manager.wait()

    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_safetensors", fail)
        save(manager, 2)
        wait_for([manager._task], 30)
        with pytest.raises(CheckpointError, match=os.strerror(number)):
            manager.poll()
        assert manager.poll() is None
    assert resolve_checkpoint(tmp_path, verify=True) == first
    save(manager, 3)
    assert manager.wait() == resolve_checkpoint(tmp_path, verify=True)


def test_no_memory_for_the_copy(tmp_path, monkeypatch):
    def fail(_):
        raise MemoryError

    manager = BackgroundManager(tmp_path)
    monkeypatch.setattr("ppfleetx.checkpoint.manager.np.empty_like", fail)
    save(manager, 1)
    manager.wait_for_copy()
    with pytest.raises(CheckpointError, match=r"not enough memory for a copy .*async_save=False"):
        manager.wait()


def test_a_save_that_cannot_be_prepared_does_not_block_the_next(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError

    manager = BackgroundManager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("ppfleetx.checkpoint.manager.HostCopier.prepare", fail)
        with pytest.raises(MemoryError):
            save(manager, 1)
    save(manager, 2)
    assert manager.wait() == resolve_checkpoint(tmp_path)


def test_an_abandoned_save_is_completed_when_nobody_else_is_needed(tmp_path, held_back):
    manager = BackgroundManager(tmp_path)
    path = save(manager, 1)
    threading.Timer(0.1, held_back.set).start()
    manager.abandon()
    assert resolve_checkpoint(tmp_path, verify=True) == path


def test_memory_is_kept_and_what_is_a_copy_is_not_copied_again():
    copier, tensors = HostCopier(), live()
    fresh = np.arange(4.0, dtype=np.float32)
    tensors[2] = replace(tensors[2], data=fresh, changes_with_update=False, shape=(4,), global_shape=(4,))
    addresses = []
    for _ in range(2):
        copies, copy = copier.prepare(tensors)
        copy()
        addresses.append([piece.array().ctypes.data for piece in copies])
        assert copies[2].array() is fresh
        for original, copied in zip(tensors, copies, strict=True):
            assert np.array_equal(original.array(), copied.array())
            assert original.changes_with_update != np.shares_memory(original.array(), copied.array())
    assert addresses[0] == addresses[1]
