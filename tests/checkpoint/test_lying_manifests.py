"""Manifests that are sealed and say what cannot be, and markers that do not fit."""

import json
import random
import re

import numpy as np
import pytest

from ppfleetx.checkpoint.manifest import marker_of, seal
from ppfleetx.checkpoint.reader import open_checkpoint, read_marker
from ppfleetx.checkpoint.slices import covers_once
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


def twice(document):
    document["tensors"].append(tensor(document, "whole"))


def unlisted(document):
    document["files"]["other/model.safetensors"] = document["files"].pop(f"{RANK}/model.safetensors")


def outside(document):
    document["files"]["../x"] = {"num_bytes": 5, "header_bytes": 0, "header_crc32": "00000000"}


LIES = {
    "the same half twice": same_half_twice,
    "halves that overlap": set_in("halves", "offset", [2, 0], 1),
    "a larger shape": set_in("whole", "shape", [7, 4]),
    "another element type": set_in("whole", "dtype", "F64"),
    "a vocabulary nowhere": set_in("whole", "vocab_dim", 2),
    "no slices": set_in("whole", "slices", []),
    "too few checksums": set_in("whole", "crc32", [], 0),
    "a file that is not listed": unlisted,
    "a file outside of the checkpoint": outside,
    "a tensor twice": twice,
    "an unknown key": set_key("surprise", 1),
    "another format": set_key("format", "x"),
    "a later version": set_key("version", 2),
    "no object": lambda _: b"[]",
}


@pytest.mark.parametrize("kind", LIES)
def test_impossible_manifests_are_refused(tmp_path, kind):
    path = saved(tmp_path / "out")
    reseal(path, LIES[kind])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        open_checkpoint(path)


def test_what_is_resealed_and_true_is_read(tmp_path):
    path = saved(tmp_path)
    reseal(path, lambda document: document["tensors"].reverse())
    for name in ("halves", "whole"):
        np.testing.assert_array_equal(open_checkpoint(path).read(name), MATRIX)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"manifest_sha256": "0"}, "its checksum differs"),
        ({"format": "x" * 1000}, "is of format 'xxx"),
    ],
)
def test_wrong_markers(tmp_path, wrong, words):
    path = saved(tmp_path)
    fields = read_marker(path) | wrong
    fields.pop("crc32", None)
    (path / "COMPLETE").write_bytes(seal(**fields))
    with pytest.raises(CheckpointError, match=words):
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
