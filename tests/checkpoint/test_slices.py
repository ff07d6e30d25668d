"""Box arithmetic against index arrays, and reading any box of a tensor saved in any slices."""

from itertools import product

import numpy as np
import pytest

from ppfleetx.checkpoint.manifest import Manifest, rank_directory
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.slices import intersect
from ppfleetx.checkpoint.writer import commit, saving, write_rank
from ppfleetx.config.errors import CheckpointError
from tests.checkpoint.checkpoints import piece, save


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
