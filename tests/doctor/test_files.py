"""Data, tokenizer, output directory and memory, with real faults where the system lets us make them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from ppfleetx.doctor import files
from ppfleetx.doctor.configuration import memory, memory_row, plan, start
from ppfleetx.doctor.results import Status
from tests.doctor.conftest import by_name

NOBODY = 65534


@contextlib.contextmanager
def ordinary_user():
    """Not root, for whom every file can be read."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_data_that_is_there_is_opened(target):
    rows = by_name(files.data(target()))
    assert rows["Data.Train"].status is Status.OK
    assert "2,400 tokens in 60 sequences, every byte as in toy.checksums.json" in rows["Data.Train"].found
    assert "checksums" not in rows


def missing(prefix):
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}{suffix}").unlink()


def cut_off(prefix):
    with open(f"{prefix}.bin", "r+b") as file:
        file.truncate(1000)


def changed(prefix):
    """One bit on the disk."""
    content = np.fromfile(f"{prefix}.bin", np.uint8)
    content[1000] ^= 1
    content.tofile(f"{prefix}.bin")


def short(prefix):
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document(np.arange(5), [5])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (missing, "toy"),
        (cut_off, "toy.bin"),
        (changed, "block 0, bytes [0, 4,800), is not as it was written"),
        (short, "the Train split has 5 tokens, and one sample needs 33"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named(target, prefix, fault, words):
    before = files.fingerprints(target())
    fault(prefix)
    row = by_name(files.data(target()))["Data.Train"]
    assert row.status is Status.FAIL and words in row.found and "mount" in row.fix
    assert fault is changed or files.fingerprints(target()) != before


def test_data_that_this_user_may_not_read_is_named(target, prefix):
    target = target()
    Path(f"{prefix}.bin").chmod(0)
    for directory in (prefix.parent, *prefix.parent.parents):
        if directory.owner() == "root" and str(directory).startswith("/tmp/pytest"):
            directory.chmod(0o755)
    with ordinary_user():
        row = by_name(files.data(target))["Data.Train"]
        found = files.fingerprints(target)
    assert row.status is Status.FAIL and "ermission denied" in row.found and "chmod a+r" in row.fix
    assert found["Data.Train"] == "not readable"


def test_a_corpus_without_checksums_is_a_warning(target, prefix):
    before = files.fingerprints(target())
    Path(f"{prefix}.checksums.json").unlink()
    row = by_name(files.data(target()))["checksums"]
    assert row.status is Status.WARN and str(prefix) in row.found
    assert files.fingerprints(target())[str(prefix)] != before[str(prefix)]


@pytest.mark.parametrize(
    ("check", "overrides", "named"),
    [
        (files.tokenizer, ["Data.tokenizer.dir=none"], "Data.tokenizer.dir"),
        (files.tokenizer, ["Model.vocab_size=100", "Model.vocab_size_divisible_unit=4"], "vocab_size"),
        (files.checkpoints, ["Engine.save_load.init_from=none"], "Engine.save_load.init_from"),
    ],
)
def test_what_a_run_starts_from_and_is_not_there_or_does_not_fit_is_named(target, check, overrides, named):
    (row,) = check(target(*overrides))
    assert row.status is Status.FAIL and named in f"{row.name} {row.found}"


# -- output directory ------------------------------------------------------------------------------


def test_the_output_directory_is_written_and_left_as_it_was(target, tmp_path):
    before = sorted(tmp_path.iterdir())
    (row,) = files.output_directory(target())
    assert row.status is Status.OK and "to be created in" in row.found
    assert row.numbers["bytes_per_second"] > 0
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_directory_that_cannot_be_written_is_named(target, tmp_path):
    (tmp_path / "output").mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    with ordinary_user():
        (row,) = files.output_directory(target())
    assert row.status is Status.FAIL and "cannot be written: Permission denied" in row.found
    (tmp_path / "file").touch()
    (row,) = files.output_directory(target(f"Engine.save_load.output_dir={tmp_path}/file/output"))
    assert row.status is Status.FAIL and "is a file" in row.found


@contextlib.contextmanager
def small_file_system(directory, options):
    """One in memory, mounted there; where that is not allowed the test is skipped."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_is_named(target, tmp_path):
    directory = tmp_path / "output"
    directory.mkdir()
    with small_file_system(directory, "size=1m"):
        (written,) = files.output_directory(target())
        (room,) = files.room(target())
    assert written.status is Status.FAIL and "No space left on device" in written.found
    assert room.status is Status.FAIL and "2 checkpoints of 1.6 MiB: not one fits" in room.found


def test_room_for_all_for_some_and_for_none(tmp_path):
    found = [files.room_row(free, 10 << 20, 3, tmp_path) for free in (40 << 20, 20 << 20, 5 << 20)]
    assert [row.status for row in found] == [Status.OK, Status.WARN, Status.FAIL]
    assert "2 fit" in found[1].found and "keep_max" in found[1].fix


def test_checkpoints_that_lie_there_at_once(target):
    assert files.checkpoints_at_once(target().cfg) == 2  # 8 steps, one saved every 4
    assert files.checkpoints_at_once(target("Engine.save_load.keep_max=1", "Engine.max_steps=80").cfg) == 2
    assert files.checkpoints_at_once(target("Engine.save_load.save_steps=null").cfg) == 1


# -- plan and memory -------------------------------------------------------------------------------


def test_a_plan_for_other_processes(target):
    dp4 = ("Distributed.dp_degree=4", "Global.local_batch_size=4")
    assert by_name(plan(target(*dp4)))["plan"].status is Status.SKIPPED
    row = by_name(plan(target(*dp4, world_size=2, rank=1)))["plan"]
    assert row.status is Status.FAIL and "4 processes, there are 2" in row.found
    assert by_name(plan(target(*dp4, world_size=4)))["plan"].status is Status.OK


def test_a_run_that_would_start_over_another_is_named(target, tmp_path):
    (row,) = start(target())
    assert row.status is Status.OK
    (tmp_path / "output").mkdir()
    (tmp_path / "output/metrics.jsonl").write_text("{}\n")
    (row,) = start(target())
    assert row.status is Status.FAIL and "already holds a run" in row.found


def test_memory_against_what_is_there(target):
    assert by_name(memory(target()))["memory"].status is Status.OK
    assert memory_row(2e10, 1e10, "A100", cpu=False).status is Status.FAIL
    assert memory_row(2e10, 1e10, "this machine", cpu=True).status is Status.WARN
