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


def content_of(header, data=bytes(64)):
    """A file with this header (a table, or its bytes as they are) and these bytes of data."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "content, words",
    [
        (content_of({"a": entry(0, 128)}), "damaged"),  # beyond the file
        (content_of({"a": entry(0, 64, [3])}), "damaged"),  # shape and bytes differ
        (content_of({"a": entry(0, 64, [8], dtype="C64")}), "C64"),
        (content_of(b"x" * 40), "damaged"),
        (b"", "not a safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "cut off"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path, content, words):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


def test_what_is_sound_is_read(tmp_path):
    entries = {
        "b": entry(32, 64),
        "none": entry(32, 32, [0, 5]),
        "a": entry(0, 28),
        "one": entry(28, 32, []),
        "last": entry(64, 64),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(content_of(entries, np.arange(16, dtype=np.float32).tobytes()))
    found = read_safetensors(path)
    np.testing.assert_array_equal(found["b"].read(), np.arange(8, 16))
    assert found["none"].read().shape == (0, 5) and found["one"].read() == 7
    path.write_bytes(path.read_bytes()[:-1])  # cut off after the header was read
    with pytest.raises(CheckpointError, match="ends too early"):
        found["b"].read()
