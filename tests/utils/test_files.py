"""Files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppfleetx.utils.files import atomic_write


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(FileExistsError, match="is a device or a pipe"), atomic_write(path) as file:
            file.write(b"results")
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
