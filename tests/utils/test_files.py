"""Files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppfleetx.utils.files import atomic_write, is_taken


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(FileExistsError, match="is a device or a pipe"), atomic_write(path) as file:
            file.write(b"results")
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_only_an_empty_directory_is_free(tmp_path: Path) -> None:
    assert not is_taken(tmp_path / "new")
    assert not is_taken(tmp_path)
    (tmp_path / "file").touch()
    assert is_taken(tmp_path)
    assert is_taken(tmp_path / "file")
