"""Files of others: what is no file, too large, too deep or no JSON ends in a sentence that names it."""

import os
import re
import time
from pathlib import Path

import pytest

from ppfleetx.config.errors import CheckpointError, DataError
from ppfleetx.utils.foreign_files import opened, parse_json, read_bounded, read_json


def special_files(directory: Path):
    """name -> (something at that path that is no file, what is said about it)."""
    (directory / "dir").mkdir()
    os.mkfifo(directory / "pipe")
    (directory / "loop").symlink_to(directory / "loop")
    (directory / "dangling").symlink_to(directory / "nowhere")
    (directory / "endless").symlink_to("/dev/zero")
    return {
        directory / "dir": "is a directory, not a file",
        directory / "pipe": "is a pipe, not a file",
        directory / "endless": "is a device, not a file",
        directory / "loop": "cannot be read: Too many levels of symbolic links",
        directory / "dangling": "cannot be read: No such file or directory",
        directory / "nowhere": "cannot be read: No such file or directory",
        directory / ("x" * 300): "cannot be read: File name too long",
        directory / "dir" / "x" / "y": "cannot be read: No such file or directory",
        directory / "a\0b": "is not the name of a file",
    }


def test_what_is_no_file_is_refused_at_once(tmp_path):
    begun = time.monotonic()
    for path, words in special_files(tmp_path).items():
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read_json(path)
        with pytest.raises(DataError, match=re.escape(words)), opened(path, DataError):
            pass
    assert time.monotonic() - begun < 5  # a pipe without a writer is not waited for


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
        (b"", "is not sound JSON: Expecting value"),
        (b"{", "is not sound JSON"),
        (b"[]", "holds no JSON object"),
        (b"null", "holds no JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "the key 'c' is there twice"),
        (b'{"a": NaN}', "NaN is not a value of JSON"),
        (b'{"a": -Infinity}', "-Infinity is not a value of JSON"),
        (b'{"a": 1e999}', "the number '1e999' is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not sound JSON"),
        (b'{"a": "\xff"}', "is not sound JSON"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64 levels deep"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "is nested too deeply"),
        (b'{"a": [' + b"1," * 2_600_000 + b"1]}", "more than 2500000 values"),
    ],
)
def test_json_that_is_none(content, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        parse_json(content, "place.json")
    assert str(caught.value).startswith("place.json ") and len(str(caught.value)) < 300


def test_json_that_is_one():
    content = b'{"a": [1, 2.5, null, true], "b": "\\ud83d\\ude00 \xc3\xa9", "c": {}}'
    assert parse_json(content, "x") == {"a": [1, 2.5, None, True], "b": "\U0001f600 \u00e9", "c": {}}
    deep = b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}"
    assert parse_json(deep, "x") == parse_json(deep, "x", max_depth=64)
