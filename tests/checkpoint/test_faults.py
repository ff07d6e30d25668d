"""Flipped bytes, torn files, failing disks, killed savers: found, told, and what was there stays good."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.checkpoint import storage
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import complete_checkpoints, newest_good, resolve_checkpoint
from ppfleetx.config.errors import CheckpointError
from tests.checkpoint.checkpoints import arrays, save

REPOSITORY = Path(__file__).parents[2]


def files_of(output_dir):
    return sorted(path for path in output_dir.rglob("*") if path.is_file() and path.name != ".lock")


def snapshot(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_every_flip_and_truncation_is_found(tmp_path):
    save(tmp_path, config={"Model": {"hidden_size": 4}}, vocab_size=11)
    resolve_checkpoint(tmp_path, verify=True)
    rng = random.Random(0)
    for path in files_of(tmp_path):
        sound = path.read_bytes()
        damaged = [sound[: rng.randrange(len(sound))] for _ in range(4)] + [sound + b"\n"]
        for _ in range(16):
            position = rng.randrange(len(sound))
            wrong = bytes([sound[position] ^ rng.randrange(1, 256)])
            damaged.append(sound[:position] + wrong + sound[position + 1 :])
        for content in damaged:
            path.write_bytes(content)
            with pytest.raises(CheckpointError):
                resolve_checkpoint(tmp_path, verify=True)
        path.unlink()
        if path.name != "latest":  # without it the newest complete one is meant
            with pytest.raises(CheckpointError):
                resolve_checkpoint(tmp_path, verify=True)
        path.write_bytes(sound)
    resolve_checkpoint(tmp_path, verify=True)


def test_damage_is_found_while_reading_and_names_the_file(tmp_path):
    path = save(tmp_path)
    data = next(path.rglob("model.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    opened = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: wrong checksum in the"):
        opened.read(opened.names()[-1])
    with pytest.raises(CheckpointError, match=f"model {opened.names()[-1]}: "):
        opened.verify()
    assert np.array_equal(opened.read(opened.names()[0]), arrays(1)[opened.names()[0]])


def test_only_the_chunks_that_are_read_are_checked(tmp_path, monkeypatch):
    for module in ("storage", "manifest"):
        monkeypatch.setattr(f"ppfleetx.checkpoint.{module}.CHUNK_BYTES", 16)
    path = save(tmp_path)
    name = "embedding.word_embeddings.weight"  # 12 rows of 16 bytes
    opened = open_checkpoint(path)
    entry = opened.entry(name).slices[0]
    with (path / entry.file).open("r+b") as file:
        file.seek(entry.start + 5 * 16)
        file.write(b"\xff\xfe")
    assert np.array_equal(opened.read(name, offset=(6, 0), shape=(6, 4)), arrays(1)[name][6:])
    with pytest.raises(CheckpointError, match="damaged"):
        opened.read(name, offset=(5, 0), shape=(1, 1))


OPERATIONS = ("write_bytes", "flush", "rename", "write_small", "exchange")


class FailingDisk:
    """Lets `allowed` operations pass and fails from then on, until told to stop."""

    def __init__(self, monkeypatch, allowed, number):
        self.allowed, self.number, self.failed = allowed, number, False
        for operation in OPERATIONS:
            monkeypatch.setattr(storage, operation, self._wrap(getattr(storage, operation)))

    def _wrap(self, function):
        def limited(*args):
            if self.allowed == 0:
                self.failed = True
                raise OSError(self.number, os.strerror(self.number), "somewhere")
            self.allowed -= 1
            return function(*args)

        return limited


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("same_name", [False, True])
def test_a_disk_that_fails_at_any_point(tmp_path, number, same_name):
    first = save(tmp_path, step=1)
    before = snapshot(first)
    for allowed in range(200):
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, allowed, number)
            try:
                save(tmp_path, step=1 if same_name else 2, state={"step": 1})
            except CheckpointError as error:
                assert os.strerror(number) in str(error) and "Earlier checkpoints" in str(error)
                assert ("keep_max" in str(error)) is (number == errno.ENOSPC)
        if not disk.failed:
            break
        resolved = resolve_checkpoint(tmp_path, verify=True)
        if not same_name:
            assert snapshot(first) == before
            assert resolved in (first, tmp_path / "epoch_0_step_2")
        assert not list(tmp_path.glob(".saving-*"))
    assert allowed > 15
    save(tmp_path, step=3)
    assert resolve_checkpoint(tmp_path, verify=True).name == "epoch_0_step_3"


def test_bytes_that_do_not_arrive_are_noticed_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    first = save(tmp_path, step=1)
    original = storage.write_bytes

    def forgetful(file, content):
        original(file, bytes(content).replace(b"\x3f", b"\x3e") if len(content) == 192 else content)

    monkeypatch.setattr(storage, "write_bytes", forgetful)
    with pytest.raises(CheckpointError, match=r"step_2 could not be written .* wrong checksum .* Earlier"):
        save(tmp_path, step=2)
    assert resolve_checkpoint(tmp_path) == first
    assert not list(tmp_path.glob("*step_2"))


def test_an_exception_in_the_middle_leaves_nothing(tmp_path):
    def broken():
        yield from ()
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="gone"):
        save(tmp_path, tensors=broken())
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_old_checkpoints_that_resist_deletion_do_not_stop_training(tmp_path, monkeypatch, caplog):
    save(tmp_path, step=1)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("ppfleetx.checkpoint.output_dir.delete_checkpoint", refuse)
    assert save(tmp_path, step=2, keep_max=1).name == "epoch_0_step_2"
    assert "could not be deleted: Permission denied" in caplog.text


SAVER = """
import sys
sys.path[:0] = [{repository!r}, {tests!r}]
from tests.checkpoint.checkpoints import save
run = int(sys.argv[2])
while True:
    run += 1
    save(sys.argv[1], step=run % 7, keep_max=2, state={{"run": run}})
    print(run, flush=True)
"""


def test_killed_at_random_moments(tmp_path):
    """Names are reused and old ones deleted all the time, so every kind of moment is hit."""
    code = SAVER.format(repository=str(REPOSITORY), tests=str(Path(__file__).parent))
    save(tmp_path, step=0, state={"run": 0})
    rng = random.Random(time.time_ns())
    for _ in range(6):
        start = newest_good(tmp_path).state["run"]
        command = [sys.executable, "-c", code, str(tmp_path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            began = time.perf_counter()
            told = int(process.stdout.readline())
            time.sleep(rng.uniform(0.0, 1.5) * (time.perf_counter() - began))
            process.send_signal(signal.SIGKILL)
        resolved = resolve_checkpoint(tmp_path, verify=True)
        assert resolved in complete_checkpoints(tmp_path)
        assert told == start + 2 and open_checkpoint(resolved).state["run"] >= told
        for path in tmp_path.glob("epoch_*"):
            open_checkpoint(path).verify()
    save(tmp_path, step=99, keep_max=2)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".saving", ".deleting"))]
