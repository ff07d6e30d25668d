"""Manifests that are sealed and say what cannot be: refused on loading, inspecting and converting."""

import json
import os
import random
import re
from itertools import product

import numpy as np
import pytest

from ppfleetx.checkpoint.entries import CHUNK_BYTES
from ppfleetx.checkpoint.inspect import open_for_inspection
from ppfleetx.checkpoint.layout import merge
from ppfleetx.checkpoint.manifest import marker_of
from ppfleetx.checkpoint.reader import open_checkpoint, read_marker
from ppfleetx.checkpoint.slices import covers_once
from ppfleetx.checkpoint.weights_only import read_ppfleetx
from ppfleetx.config.errors import CheckpointError
from tests.checkpoint.checkpoints import RANK, piece, save

MATRIX = np.arange(24, dtype=np.float32).reshape(6, 4)


def saved(output_dir):
    """A checkpoint with a tensor in two halves and a whole one."""
    tensors = [
        piece("halves", MATRIX[:3], (0, 0), (6, 4)),
        piece("halves", MATRIX[3:], (3, 0), (6, 4)),
        piece("whole", MATRIX),
    ]
    return save(output_dir, tensors=tensors)


def reseal(path, change):
    """Change the manifest's document, or its bytes, and seal it again."""
    file = path / "manifest.json"
    document = json.loads(file.read_bytes())
    changed = change(document)
    content = changed if isinstance(changed, bytes) else json.dumps(document).encode()
    file.write_bytes(content)
    (path / "COMPLETE").write_bytes(marker_of(content, 1))


def tensor(document, name):
    return next(entry for entry in document["tensors"] if entry["name"] == name)


def set_in(name, key, value, index=None):
    """Change one value of a tensor, or of its slice number `index`."""

    def change(document):
        entry = tensor(document, name)
        (entry if index is None else entry["slices"][index])[key] = value

    return change


def same_half_twice(document):
    slices = tensor(document, "halves")["slices"]
    slices[1] = slices[0]


def set_key(key, value):
    return lambda document: document.update({key: value})


def set_file(key, value):
    return lambda document: document["files"][f"{RANK}/model.safetensors"].update({key: value})


def twice(document):
    document["tensors"].append(tensor(document, "whole"))


def unlisted(document):
    document["files"]["other/model.safetensors"] = document["files"].pop(f"{RANK}/model.safetensors")


def another_file_too(document):
    document["files"]["x"] = {"num_bytes": 5, "header_bytes": 0, "header_crc32": "00000000"}


LIES = {
    "the same half twice": (same_half_twice, "'?model halves'?: its slices overlap and leave holes"),
    "halves that overlap": (set_in("halves", "offset", [2, 0], 1), "halves: its slices overlap"),
    "a half elsewhere": (set_in("halves", "offset", [4, 0], 1), "halves': a slice reaches beyond the tensor"),
    "a part of a half": (set_in("halves", "flat", [0, 5], 1), r"has the flat interval \[0, 5\]; no plan"),
    "the bytes of another slice": (set_in("halves", "start", 0, 1), "slices in .* overlap at byte 0"),
    "half of the bytes": (set_in("halves", "num_bytes", 24, 1), "sizes contradict each other"),
    "a larger shape": (set_in("whole", "shape", [7, 4]), "do not make up the whole tensor"),
    "a negative shape": (set_in("halves", "shape", [-3, 4], 1), r"has \[-3, 4\] for a place or shape"),
    "a float in a shape": (set_in("whole", "shape", [6.0, 4]), r"has \[6.0, 4\] for a place or shape"),
    "true in a shape": (set_in("whole", "shape", [True, 4]), r"has \[True, 4\] for a place or shape"),
    "a text for a shape": (set_in("whole", "shape", "64"), "has '64' for a place or shape"),
    "another element type": (set_in("whole", "dtype", "F64"), "sizes contradict each other"),
    "an unknown element type": (set_in("whole", "dtype", "F33"), "unknown element type 'F33'"),
    "an unknown kind": (set_in("whole", "kind", "other"), "unknown kind 'other'"),
    "a list for a name": (set_in("whole", "name", ["x"]), r"has the name \['x'\]"),
    "a vocabulary nowhere": (set_in("whole", "vocab_dim", 2), r"no dimension 2 \(vocab_dim\)"),
    "no slices": (set_in("whole", "slices", []), "it has no slices"),
    "slices that are none": (set_in("whole", "slices", [5]), "has not exactly the keys offset, shape, file"),
    "checksums that are none": (set_in("whole", "crc32", ["x"], 0), "has no proper checksums"),
    "too few checksums": (set_in("whole", "crc32", [], 0), "sizes contradict each other"),
    "a file that is not listed": (unlisted, "which is not listed"),
    "a file that is not there": (another_file_too, "slices in 'x' end at byte 0 of 5"),
    "a longer file": (set_file("num_bytes", 10**6), r"end at byte \d+ of 1000000"),
    "a longer header": (set_file("header_bytes", 10**15), "and a header of 1000000000000000"),
    "a number for a checksum": (set_file("header_crc32", 5), "has no proper sizes and checksum"),
    "no tensors": (set_key("tensors", []), r"end at byte \d+ of"),
    "a tensor twice": (twice, "a tensor is listed twice"),
    "tensors as an object": (set_key("tensors", {}), "tensors is not a list"),
    "files as a list": (set_key("files", []), "files is not an object"),
    "an unknown key": (set_key("surprise", 1), "it has the unknown key 'surprise'"),
    "a step before the first": (set_key("step", -1), "step is -1, which it cannot be"),
    "true for a step": (set_key("step", True), "step is True, which it cannot be"),
    "a list for the state": (set_key("state", []), r"state is \[\], which it cannot be"),
    "a number for the progress": (set_key("state", {"train": 5}), "state.train is 5, which it cannot be"),
    "a list for the source": (set_key("state", {"source": []}), r"state.source is \[\], which it cannot be"),
    "a list for the Model section": (set_key("config", {"Model": [1]}), "config.Model is .1., which"),
    "a number for a rank": (set_key("ranks", [5]), "one of ranks is no object with a directory"),
    "a vocabulary of half a token": (set_key("vocab_size", 0.5), "vocab_size is 0.5, which it cannot be"),
    "another format": (set_key("format", "x"), "is not the manifest of a ppfleetx checkpoint"),
    "version [1]": (set_key("version", [1]), r"has format version \[1\]; this program reads version 1"),
    "other chunks": (set_key("chunk_bytes", 5), f"another size than {CHUNK_BYTES}"),
    "no object": (lambda _: b"[]", "holds no JSON object"),
    "deep": (lambda _: b'{"state": ' + b"[" * 100_000, "nested too deeply"),
    "wide": (lambda _: b'{"state": [' + b"1," * 3_000_000 + b"1]}", "more than 2500000 values"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIES)
def test_lies_are_refused_wherever_the_manifest_is_read(tmp_path, kind):
    change, words = LIES[kind]
    path = saved(tmp_path / "out")
    reseal(path, change)
    for use in (open_checkpoint, open_for_inspection, read_ppfleetx, lambda p: merge(p, tmp_path / "merged")):
        with pytest.raises(CheckpointError, match=words) as caught:
            use(path)
        assert str(path) in str(caught.value)
    assert not (tmp_path / "merged").exists()


def test_what_is_resealed_and_true_is_read(tmp_path):
    path = saved(tmp_path)
    reseal(path, lambda document: document["tensors"].reverse())
    for name in ("halves", "whole"):
        np.testing.assert_array_equal(open_checkpoint(path).read(name), MATRIX)


def test_markers_that_lie(tmp_path):
    path = saved(tmp_path)
    marker = path / "COMPLETE"
    fields = read_marker(path)
    for wrong, words in (
        ({"manifest_bytes": "many"}, "lacks the size"),
        ({"manifest_bytes": "-1"}, "lacks the size"),
        ({"saved_at_ns": "9" * 30}, "lacks the size"),
        ({"manifest_sha256": "0"}, "its checksum differs"),
        ({"format": "x" * 1000}, "is of format 'xxx"),
    ):
        marker.write_bytes(_sealed(fields | wrong))
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)
    marker.write_bytes(bytes(10_000))
    with pytest.raises(CheckpointError, match="COMPLETE has more than 4096 bytes"):
        open_checkpoint(path)
    marker.unlink()
    os.mkfifo(marker)
    with pytest.raises(CheckpointError, match="COMPLETE is a pipe, not a file"):
        open_checkpoint(path)


def _sealed(fields):
    from ppfleetx.checkpoint.manifest import seal

    fields.pop("crc32", None)
    return seal(**fields)


@pytest.mark.parametrize("name", ["manifest.json", f"{RANK}/model.safetensors"])
def test_what_is_no_file_is_not_waited_for(tmp_path, name):
    path = saved(tmp_path)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is a pipe, not a file"):
        open_checkpoint(path)


def test_tilings_are_told_from_what_is_none():
    """Against counting how often each index is covered, for all cuttings of small arrays and random boxes."""
    rng = random.Random(0)
    for _ in range(400):
        shape = tuple(rng.randrange(4) for _ in range(rng.randrange(4)))
        boxes = [_random_box(rng, shape) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.6:
            boxes = _random_tiling(rng, ((0,) * len(shape), shape))
            if rng.random() < 0.4:
                boxes[rng.randrange(len(boxes))] = boxes[0]
        times = np.zeros(shape, int)
        for offset, size in boxes:
            times[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
        assert covers_once(shape, boxes) == bool((times == 1).all()), (shape, boxes)


def _random_box(rng, shape):
    ends = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
    return tuple(a for a, _ in ends), tuple(b - a for a, b in ends)


def _random_tiling(rng, box):
    offset, shape = box
    cuttable = [dim for dim, n in enumerate(shape) if n > 1]
    if not cuttable or rng.random() < 0.3:
        return [box]
    dim = rng.choice(cuttable)
    at = rng.randrange(1, shape[dim])
    low = tuple(at if d == dim else n for d, n in enumerate(shape))
    high = tuple(n - at if d == dim else n for d, n in enumerate(shape))
    moved = tuple(o + at if d == dim else o for d, o in enumerate(offset))
    return _random_tiling(rng, (offset, low)) + _random_tiling(rng, (moved, high))


def test_many_slices_take_little_time(tmp_path):
    """Linear in their number: a tensor cut into 128 x 128 boxes, one of them listed twice."""
    boxes = [((row, column), (1, 1)) for row, column in product(range(128), range(128))]
    assert covers_once((128, 128), boxes)
    assert not covers_once((128, 128), [*boxes[1:], boxes[1]])
