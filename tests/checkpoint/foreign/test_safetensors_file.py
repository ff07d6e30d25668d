"""Safetensors files that lie: refused in words, and whatever the official library refuses is refused here."""

import json
import random
import struct

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ppfleetx.checkpoint.foreign.safetensors_file import read_safetensors
from ppfleetx.config.errors import CheckpointError


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


def library_reads(path):
    try:
        with safe_open(path, "numpy") as file:
            list(file.keys())
    except SafetensorError:
        return False
    return True


A, B = entry(0, 32), entry(32, 64)
TWICE = b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 64)).encode(),) * 2)

LIES = {
    "overlap": ({"a": A, "b": entry(16, 64)}, "'b' overlaps with 'a'"),
    "same bytes twice": ({"a": entry(0, 64), "b": entry(0, 64)}, "'b' overlaps with 'a'"),
    "hole": ({"a": entry(0, 16), "b": B}, "'b' leaves a gap after 'a'"),
    "hole at the front": ({"b": B}, "'b' leaves a gap after the header"),
    "trailing bytes": ({"a": A}, "32 bytes at its end belong to no tensor"),
    "no tensor": ({}, "64 bytes at its end belong to no tensor"),
    "beyond the file": ({"a": entry(0, 128)}, "is cut off: 64 bytes of its tensors are missing"),
    "far beyond": ({"a": entry(0, 1 << 60)}, "is cut off"),
    "negative": ({"a": entry(-4, 60)}, r"data_offsets \[-4, 60\]"),
    "backwards": ({"a": entry(64, 0, [0])}, "cannot lie in the -64 bytes"),
    "three offsets": ({"a": A | {"data_offsets": [0, 32, 64]}}, "has the data_offsets"),
    "shape and bytes": ({"a": entry(0, 64, [3])}, r"of shape \[3\] and type F32 cannot lie in the 64 bytes"),
    "overflow": ({"a": entry(0, 64, [1 << 62, 4, 0])}, "cannot lie in"),
    "negative shape": ({"a": entry(0, 64, [-4, -4])}, r"has the shape \[-4, -4\]"),
    "a float in the shape": ({"a": entry(0, 64, [16.0])}, r"has the shape \[16.0\]"),
    "true in the shape": ({"a": entry(0, 4, [True])}, r"has the shape \[True\]"),
    "many dimensions": (
        {"a": entry(0, 64, [1] * 10**5)},
        r"the shape \[1, 1, 1, 1, 1, 1, 1, 1, \.\.\.\]",
    ),
    "unknown type": ({"a": entry(0, 64, dtype="F33")}, "has the element type 'F33'"),
    "type of another kind": ({"a": entry(0, 64, dtype=["F32"])}, r"has the element type \['F32'\]"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 64]}}, "lacks its dtype, shape or data_offsets"),
    "no entry": ({"a": 5}, "lacks its dtype, shape or data_offsets"),
    "a name twice": (TWICE, "the key 'a' is there twice"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry(0, 64)}, "__metadata__ must be texts"),
    "not an object": (b"[]", "holds no JSON object"),
    "not JSON": (b"x" * 40, "not valid JSON"),
    "NaN": ({"a": entry(0, 64) | {"x": float("nan")}}, "NaN is not a value of JSON"),
    "deep": (b'{"__metadata__": ' + b"[" * 10**5, "nested too deeply"),
}


@pytest.mark.parametrize("kind", LIES)
def test_lies_are_refused_in_words(tmp_path, kind):
    header, words = LIES[kind]
    path = file_of(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


def test_lengths_of_the_header_that_lie(tmp_path):
    path = tmp_path / "x.safetensors"
    for content, words in (
        (b"", "it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        (struct.pack("<Q", 100_000_001), "header would have 100000001 bytes, the most are 100000000"),
        (struct.pack("<Q", 1 << 63), "the most are 100000000"),
        (struct.pack("<Q", 100) + b"{}", "header should have 100 bytes, the whole file has 10"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer that Git LFS leaves"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            read_safetensors(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
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
    assert library_reads(path)
    found = read_safetensors(path)
    np.testing.assert_array_equal(found["b"].read(), np.arange(8, 16))
    assert found["none"].read().shape == (0, 5) and found["one"].read() == 7
    path.write_bytes(path.read_bytes()[:-1])  # cut off after the header was read
    with pytest.raises(CheckpointError, match="ends too early"):
        found["b"].read()


def test_whatever_the_library_refuses_is_refused(tmp_path):
    """Random damage in the header: nothing is accepted that the library does not accept."""
    path, rng = tmp_path / "x.safetensors", random.Random(5)
    tensors = {f"t{i}": np.zeros((i, 2), np.float32) for i in range(4)} | {"s": np.zeros((), np.int8)}
    save_file(tensors, path, metadata={"format": "pt"})
    sound = path.read_bytes()
    length = int.from_bytes(sound[:8], "little") + 8
    accepted = 0
    for _ in range(600):
        damaged = bytearray(sound)
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randrange(length)
            damaged[at] = rng.choice(
                [damaged[at] ^ (1 << rng.randrange(8)), rng.choice(b'0123456789[]{},:" ')]
            )
        path.write_bytes(damaged)
        try:
            read_safetensors(path)
        except CheckpointError:
            continue
        accepted += 1
        assert library_reads(path), bytes(damaged[:length])
    assert accepted > 10  # a name or a blank was changed: it can be read as before
