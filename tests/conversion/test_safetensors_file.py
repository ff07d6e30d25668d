"""Safetensors files: what is sound is read, what is damaged is refused."""

import json
import struct

import numpy as np
import pytest

from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.safetensors_file import read_safetensors


def entry(start, end, shape=None, dtype="F32"):
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


def file_of(path, header, data=bytes(64)):
    """A file with this header (a table, or its bytes as they are) and these bytes of data."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


A, B = entry(0, 32), entry(32, 64)
LIES = {
    "beyond the file": {"a": entry(0, 128)},
    "shape and bytes": {"a": entry(0, 64, [3])},
    "a type that is not read": {"a": entry(0, 64, [8], dtype="C64")},
    "not JSON": b"x" * 40,
}
"""Headers that describe the 64 bytes behind them wrongly."""


@pytest.mark.parametrize("kind", LIES)
def test_wrong_headers_are_refused(tmp_path, kind):
    path = file_of(tmp_path / "x.safetensors", LIES[kind])
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "not a safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "cut off"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer that Git LFS leaves"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path, content, words):
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_safetensors(path)


def test_what_is_sound_is_read(tmp_path):
    path = file_of(
        tmp_path / "x.safetensors",
        {
            "b": B,
            "none": entry(32, 32, [0, 5]),
            "a": entry(0, 28),
            "one": entry(28, 32, []),
            "last": entry(64, 64),
        },
        np.arange(16, dtype=np.float32).tobytes(),
    )
    found = read_safetensors(path)
    np.testing.assert_array_equal(found["b"].read(), np.arange(8, 16))
    assert found["none"].read().shape == (0, 5) and found["one"].read() == 7
    path.write_bytes(path.read_bytes()[:-1])  # cut off after the header was read
    with pytest.raises(CheckpointError, match="ends too early"):
        found["b"].read()
