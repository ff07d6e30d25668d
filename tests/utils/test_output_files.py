"""Our own files are whole or absent; errors of other programs' files name them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ppfleetx.config.errors import CheckpointError, DataError
from ppfleetx.utils.input_files import opened, parse_json, read_bounded, read_json
from ppfleetx.utils.output_files import atomic_write, is_taken


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


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / "nowhere", "No such file or directory"),
    ):
        expected = re.escape(f"{path} cannot be read: {words}")
        with pytest.raises(CheckpointError, match=expected):
            read_json(path)
        with pytest.raises(DataError, match=expected), opened(path, DataError):
            pass


def test_a_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": 1}')
    assert read_bounded(path, 8) == b'{"a": 1}'
    assert read_json(path, max_bytes=8) == {"a": 1}
    with pytest.raises(CheckpointError, match=r"a\.json has more than 7 bytes"):
        read_json(path, max_bytes=7)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # no memory for what the size claims
    with pytest.raises(CheckpointError, match=r"a\.json has more than \d+ bytes"):
        read_json(path)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is not valid JSON: Expecting value"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "the key 'c' occurs twice"),
        (b'{"a": NaN}', "NaN is not a JSON value"),
    ],
)
def test_content_that_is_no_json_object(content, words):
    with pytest.raises(CheckpointError, match=words):
        parse_json(content, "place.json")
