"""Slices of tensors, which can be read as any box; manifests that are sealed and say what cannot be, and
markers that do not fit."""

import json
import random
import re
from itertools import product

import numpy as np
import pytest

from ppfleetx.checkpoint.manifest import Manifest, marker_of, rank_directory, seal
from ppfleetx.checkpoint.reader import open_checkpoint, read_marker
from ppfleetx.checkpoint.slices import covers_once, intersect
from ppfleetx.checkpoint.writer import commit, saving, write_rank
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


DOCUMENT = {"num_bytes": 1, "sha256": "0" * 64}
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
    **{
        f"documents {number}": set_key("documents", documents)
        for number, documents in enumerate(
            (
                [],
                {"../x": DOCUMENT},
                {"a/b/c": DOCUMENT},
                {"x": {**DOCUMENT, "num_bytes": 1 << 40}},
                {"x": {"num_bytes": 1}},
                {f"x{number}": DOCUMENT for number in range(65)},
            )
        )
    },
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


def test_intersection():
    assert intersect(((0, 2), (4, 4)), ((3, 0), (9, 5))) == ((3, 2), (1, 3))
    assert intersect(((0,), (4,)), ((4,), (2,))) is None
    assert intersect(((), ()), ((), ())) == ((), ())


def by_columns(array):
    """A column-parallel weight of three tensor-parallel ranks."""
    for start in range(0, array.shape[1], 3):
        yield piece("w", array[:, start : start + 3].copy(), (0, start), array.shape)


def by_rows(array):
    """A row-parallel weight of two."""
    for start in range(0, array.shape[0], 3):
        yield piece("w", array[start : start + 3], (start, 0), array.shape)


def by_columns_and_rows(array):
    """Boxes cut in both dimensions, which the format has and today's plans do not write."""
    rows, columns = array.shape[0] // 2, array.shape[1] // 3
    for row in (0, rows):
        for column, width in ((0, columns), (columns, array.shape[1] - columns)):
            part = array[row : row + rows, column : column + width]
            yield piece("w", part.copy(), (row, column), array.shape)


@pytest.mark.parametrize(
    "cut",
    [
        lambda a: [piece("w", a)],
        by_columns,
        by_rows,
        by_columns_and_rows,
    ],
)
def test_any_box_of_any_slices(tmp_path, cut, monkeypatch):
    # Small blocks and chunks, so that their borders are crossed.
    for module in ("storage", "manifest"):
        monkeypatch.setattr(f"ppfleetx.checkpoint.{module}.CHUNK_BYTES", 16)
    monkeypatch.setattr("ppfleetx.checkpoint.reader._BLOCK_BYTES", 40)
    array = np.random.default_rng(0).standard_normal((6, 9)).astype(np.float32)
    opened = open_checkpoint(save(tmp_path, tensors=cut(array)))
    opened.verify()
    for row, column in product(range(6), range(9)):
        for rows, columns in product(range(1, 7 - row), range(1, 10 - column)):
            box = opened.read("w", offset=(row, column), shape=(rows, columns))
            assert np.array_equal(box, array[row : row + rows, column : column + columns])


def test_reading_outside_or_unknown_is_refused(tmp_path):
    opened = open_checkpoint(save(tmp_path))
    with pytest.raises(CheckpointError, match="no part of shape"):
        opened.read("decoder.final_norm.weight", offset=(3,), shape=(2,))
    with pytest.raises(CheckpointError, match="holds no model tensor nothing"):
        opened.read("nothing")
    with pytest.raises(CheckpointError, match=r"state moment9 of decoder\.final_norm\.weight"):
        opened.read("decoder.final_norm.weight", "optimizer", "moment9")


def test_several_ranks_make_one_checkpoint(tmp_path):
    array = np.arange(48, dtype=np.float32).reshape(6, 8)
    with saving(tmp_path, 0, 4) as staged:
        indices = [
            write_rank(
                staged,
                rank_directory(mp=mp),
                [piece("w", array[:, mp * 4 : mp * 4 + 4], (0, mp * 4), (6, 8))],
            )
            for mp in range(2)
        ]
        path = commit(staged, Manifest(step=4, epoch=0, files={}, tensors={}), indices)
    assert sorted(p.name for p in path.iterdir() if p.is_dir()) == [rank_directory(0), rank_directory(1)]
    assert np.array_equal(open_checkpoint(path).read("w"), array)
    assert np.array_equal(open_checkpoint(path).read("w", offset=(1, 3), shape=(2, 3)), array[1:3, 3:6])


@pytest.mark.parametrize("shape", [(3, 8), (6, 9)])
def test_slices_that_do_not_make_up_the_tensor_are_not_committed(tmp_path, shape):
    array = np.zeros((6, 8), np.float32)
    with pytest.raises(CheckpointError, match=r"do not cover|reaches beyond"):
        save(tmp_path, tensors=[piece("w", array[: shape[0]], (0, 0), shape if shape[0] == 6 else (6, 8))])
    assert not list(tmp_path.glob("epoch_*"))
