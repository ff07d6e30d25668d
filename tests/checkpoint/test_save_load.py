"""What is saved is what is read; the directory's names, `latest`, retention, resolving."""

import json
import multiprocessing
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from ppfleetx.checkpoint.manager import CheckpointManager
from ppfleetx.checkpoint.output_dir import output_lock
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import newest_complete, newest_good, resolve_checkpoint
from ppfleetx.checkpoint.run_ownership import Ownership
from ppfleetx.checkpoint.slices import TensorSlice, whole
from ppfleetx.config.errors import CheckpointError
from tests.checkpoint.checkpoints import OWN, RANK, arrays, save, slices


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_round_trip(tmp_path):
    path = save(tmp_path / "new" / "dir", step=7, epoch=2, plan={"mp": 1}, vocab_size=11, config="a: 1\n")
    assert path == tmp_path / "new" / "dir" / "epoch_2_step_7"
    opened = open_checkpoint(path)
    assert (opened.step, opened.manifest.epoch, opened.state) == (7, 2, {"step": 7})
    manifest = opened.manifest
    assert (manifest.plan, manifest.vocab_size, manifest.config) == ({"mp": 1}, 11, "a: 1\n")
    assert opened.names() == list(arrays()) == opened.names("optimizer")
    for name, array in arrays(7).items():
        assert np.array_equal(opened.read(name), array)
        assert np.array_equal(opened.read(name, "optimizer", "moment1"), array * 2)
        assert opened.read(name, "optimizer", "beta1_pow").shape == (1,)
    assert (tmp_path / "new/dir/latest").read_text().startswith("checkpoint epoch_2_step_7\n")


def test_files_are_plain_safetensors(tmp_path):
    path = save(tmp_path)
    loaded = load_file(path / RANK / "model.safetensors")
    assert all(np.array_equal(loaded[name], array) for name, array in arrays(1).items())
    assert "decoder.final_norm.weight/moment1" in load_file(path / RANK / "optimizer.safetensors")
    assert json.loads((path / "manifest.json").read_text())["format"] == "ppfleetx-checkpoint"


def test_element_types_and_scalars(tmp_path):
    given = {
        "scalar": np.float32(2.5).reshape(()),
        "empty": np.zeros((0, 3), np.float32),
        "int": np.arange(5),
        "half": np.ones(3, np.float16),
        "flag": np.array([True, False]),
        "bytes": np.arange(7, dtype=np.uint8),
        "double": np.ones((2, 2)),
        "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "big_endian": np.arange(3, dtype=">f4"),
    }
    bfloat16 = TensorSlice("bf", "model", "BF16", (2,), (0,), (2,), np.array([0x3FC0, 0x4020], np.uint16))
    opened = open_checkpoint(save(tmp_path, tensors=[bfloat16, *(whole(k, v) for k, v in given.items())]))
    opened.verify()
    for name, array in given.items():
        assert opened.read(name).dtype == array.dtype.newbyteorder("<")
        assert np.array_equal(opened.read(name), array)
    assert opened.entry("bf").dtype == "BF16" and opened.read("bf").tolist() == [0x3FC0, 0x4020]


def test_large_files_are_split(tmp_path):
    path = save(tmp_path, max_file_bytes=100)
    assert (path / RANK / "model-00001-of-00002.safetensors").exists()
    opened = open_checkpoint(path)
    assert all(np.array_equal(opened.read(name), array) for name, array in arrays(1).items())


def test_data_is_made_one_tensor_at_a_time(tmp_path):
    alive, most = [0], [0]

    class Tracked(np.ndarray):
        def __del__(self):
            alive[0] -= 1

    def make():
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        return np.zeros(1000, np.float32).view(Tracked)

    lazy = [TensorSlice(f"t{i}", "model", "F32", (1000,), (0,), (1000,), make) for i in range(5)]
    save(tmp_path, tensors=lazy)
    assert most[0] <= 2


def test_resolve_takes_every_way_to_say_it(tmp_path):
    first, second = save(tmp_path, step=1), save(tmp_path, step=2)
    assert resolve_checkpoint(tmp_path) == second
    assert resolve_checkpoint(str(first)) == first
    assert resolve_checkpoint(first / RANK) == first.resolve()
    (tmp_path / "latest").unlink()
    assert resolve_checkpoint(tmp_path, verify=True) == second
    shutil.move(first, tmp_path / "renamed")
    assert resolve_checkpoint(tmp_path / "renamed") == tmp_path / "renamed"


def test_newest_is_the_one_saved_last_not_the_highest_step(tmp_path):
    save(tmp_path, step=100)
    last = save(tmp_path, step=5)
    assert newest_complete(tmp_path) == last
    assert newest_complete(tmp_path / "absent") is None


def test_resolve_errors_name_what_is_wrong_and_what_is_good(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        resolve_checkpoint(tmp_path)
    first, second = save(tmp_path, step=1), save(tmp_path, step=2)
    good = f"newest good checkpoint is {first}"
    with pytest.raises(CheckpointError, match=rf"no directory .*step_9; the {good[:12]}"):
        resolve_checkpoint(tmp_path / "epoch_0_step_9")
    marker = (second / "COMPLETE").read_bytes()
    (second / "COMPLETE").unlink()
    for path in (tmp_path, second):
        with pytest.raises(CheckpointError, match=rf"step_2 is not complete.*{good}"):
            resolve_checkpoint(path)
    (second / "COMPLETE").write_bytes(marker)
    flip(second / RANK / "model.safetensors", -1)
    with pytest.raises(CheckpointError, match=rf"model.safetensors is damaged.*{good}"):
        resolve_checkpoint(tmp_path, verify=True)
    assert newest_good(tmp_path).path == first
    shutil.rmtree(second)
    with pytest.raises(CheckpointError, match=rf"names epoch_0_step_2, which does not exist; the {good}"):
        resolve_checkpoint(tmp_path)
    (first / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="there is no other good checkpoint in "):
        resolve_checkpoint(tmp_path)


def test_keep_max_deletes_complete_ones_only(tmp_path):
    torn = tmp_path / "epoch_0_step_1"
    torn.mkdir()
    (torn / "notes").write_text("mine")
    manager = CheckpointManager(tmp_path, Ownership(OWN, keep_max=2), plan={"dp": 1})
    for step in (2, 3, 4):
        manager.save(epoch=0, step=step, tensors=slices(), state={})
    names = sorted(path.name for path in tmp_path.glob("epoch_*"))
    assert names == ["epoch_0_step_1", "epoch_0_step_3", "epoch_0_step_4"]
    assert newest_good(manager.output_dir).manifest.plan == {"dp": 1}


def test_the_newest_is_kept_after_the_clock_was_set_back(tmp_path, monkeypatch):
    for step, seconds in ((1, 1000), (2, 2000), (3, 500), (4, 501)):
        monkeypatch.setattr("time.time_ns", lambda at=seconds: at * 10**9)
        last = save(tmp_path, step=step, keep_max=2)
        assert last == resolve_checkpoint(tmp_path) == newest_complete(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("epoch_*")) == ["epoch_0_step_3", "epoch_0_step_4"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_saving_under_a_name_in_use_replaces_it(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr("ppfleetx.checkpoint.storage.exchange", lambda one, other: False)
    save(tmp_path, state={"run": 1})
    save(tmp_path, state={"run": 2})
    assert open_checkpoint(resolve_checkpoint(tmp_path)).state == {"run": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "epoch_0_step_1", "latest"]


def test_leftovers_of_killed_saves_go_at_the_next_save(tmp_path):
    old = save(tmp_path, step=1)
    shutil.copytree(old, tmp_path / ".saving-epoch_0_step_2")
    shutil.copytree(old, tmp_path / ".deleting-epoch_0_step_0")
    old.rename(tmp_path / ".replaced-epoch_0_step_1")  # killed between two renames: the name comes back
    save(tmp_path, step=3)
    assert sorted(path.name for path in tmp_path.glob("*epoch*")) == ["epoch_0_step_1", "epoch_0_step_3"]


def test_state_must_be_json(tmp_path):
    for bad in ({"x": np.float32(1)}, {"loss": float("nan")}):
        with pytest.raises(CheckpointError, match="cannot be written as JSON"):
            save(tmp_path, state=bad)
    assert not list(tmp_path.glob("*epoch*"))


def _hold(path, held, release):
    with output_lock(path):
        held.set()
        release.wait(20)


def test_two_processes_do_not_save_together(tmp_path, monkeypatch):
    monkeypatch.setattr("ppfleetx.checkpoint.output_dir._LOCK_SECONDS", 0.3)
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, held, release))
    other.start()
    assert held.wait(20)
    try:
        with pytest.raises(CheckpointError, match="another process is saving"):
            save(tmp_path)
    finally:
        release.set()
        other.join()
    assert resolve_checkpoint(save(tmp_path)) == tmp_path / "epoch_0_step_1"


def test_passing_over_bad_checkpoints_is_said(tmp_path, caplog):
    good, flipped, unmarked = (save(tmp_path, step=step) for step in (1, 2, 3))
    flip(flipped / RANK / "optimizer.safetensors", -3)
    (unmarked / "COMPLETE").write_bytes(b"")
    assert newest_good(tmp_path).path == good
    assert "epoch_0_step_3/COMPLETE is damaged" in caplog.text
    assert "epoch_0_step_2" in caplog.text and "optimizer.safetensors is damaged" in caplog.text
    assert newest_good(tmp_path, verify=False).path == flipped
