"""A file system that never answers, for real: FUSE without a program behind it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppfleetx.doctor import agreement, registry
from ppfleetx.doctor.agreement import digests, in_full
from ppfleetx.doctor.check import Status
from ppfleetx.doctor.registry import CHECKS, examine

_AT_ONCE = 2  # MNT_DETACH


@contextlib.contextmanager
def hung(place: Path) -> Iterator[None]:
    """Everything below ``place`` waits until the end, and fails then."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE: {error}")
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
        if library.mount(b"hung", bytes(place), b"fuse", 0, options.encode()):
            pytest.skip(f"no FUSE here: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            library.umount2(bytes(place), _AT_ONCE)
    finally:
        os.close(device)


def test_a_file_system_that_does_not_answer_is_named_in_time(target, tmp_path, monkeypatch):
    place = tmp_path / "gone"
    place.mkdir()
    there = target(
        f"Data.Train.dataset.input_dir={place}/toy",
        f"Engine.save_load.output_dir={place}/output",
        patience=0.3,
    )
    monkeypatch.setattr(registry, "_LEAST_PATIENCE", 0.3)
    monkeypatch.setattr(agreement, "_READ_SECONDS", 0.3)
    begin = time.monotonic()
    with hung(place):
        chosen = [check for check in CHECKS if check.group in ("configuration", "files", "storage")]
        rows = {row.name: row for check in chosen for row in examine(check, there)}
        told = digests(there, print)
        (words,) = in_full(there, ["data and tokenizer"], print).values()
    for name in ("data", "tokenizer", "output directory", "room"):
        assert rows[name].status is Status.FAIL and rows[name].found == "no answer within 0 s"
        assert "file system" in rows[name].fix
    assert words == agreement._UNREAD
    assert told["data and tokenizer"] and time.monotonic() - begin < 30.0
