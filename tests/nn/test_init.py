"""Initial weights depend on seed, name and global index, and on nothing else."""

import numpy as np
import pytest

from ppfleetx.nn.init import Constant, Normal, draw

GOLDEN = np.array([[0.21700984, -1.267546], [0.5539534, -0.103650436]], dtype=np.float32)
SHAPE = (300, 1100)  # several tiles each way, none of them full at the edges


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [2, 4, 5, 10])
def test_slices_are_bitwise_those_of_the_whole(dim, parts):
    whole = draw(Normal(0.02), 3, "a.weight", SHAPE)
    size = SHAPE[dim] // parts
    pieces = []
    for rank in range(parts):
        offset, local = [0, 0], list(SHAPE)
        offset[dim], local[dim] = rank * size, size
        pieces.append(draw(Normal(0.02), 3, "a.weight", SHAPE, offset, local))
    np.testing.assert_array_equal(np.concatenate(pieces, dim), whole)


def test_a_block_and_a_single_element():
    whole = draw(Normal(1.0), 3, "a.weight", SHAPE)
    np.testing.assert_array_equal(
        draw(Normal(1.0), 3, "a.weight", SHAPE, (127, 511), (2, 2)), whole[127:129, 511:513]
    )
    assert draw(Normal(1.0), 3, "a.weight", SHAPE, (299, 1099), (1, 1))[0, 0] == whole[299, 1099]


def test_distribution_and_independence():
    first = draw(Normal(2.0), 3, "a.weight", SHAPE)
    assert first.dtype == np.float32
    assert first.mean() == pytest.approx(0, abs=0.02) and first.std() == pytest.approx(2.0, rel=0.01)
    assert np.mean(np.abs(first) < 2.0) == pytest.approx(0.6827, abs=0.005)
    for other in (draw(Normal(2.0), 4, "a.weight", SHAPE), draw(Normal(2.0), 3, "b.weight", SHAPE)):
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.01
    tiles = first[:128, :512].ravel(), first[128:256, :512].ravel()
    assert abs(np.corrcoef(*tiles)[0, 1]) < 0.02


def test_values_do_not_change_between_versions():
    # A change here changes the initial weights of every run with a given seed.
    np.testing.assert_array_equal(draw(Normal(1.0), 1024, "x", (2, 2)), GOLDEN)


@pytest.mark.parametrize("dim", [0, 1])
def test_vocabulary_padding_is_zero_in_every_slice(dim):
    init = Normal(0.02, padded_dim=dim, true_size=250)
    whole = np.moveaxis(draw(init, 3, "w", SHAPE), dim, 0)
    assert (whole[250:] == 0).all() and np.abs(whole[249]).max() > 0
    for start, size in ((0, 100), (200, 100), (260, 40)):
        offset, local = [0, 0], list(SHAPE)
        offset[dim], local[dim] = start, size
        part = np.moveaxis(draw(init, 3, "w", SHAPE, offset, local), dim, 0)
        np.testing.assert_array_equal(part, whole[start : start + size])


def test_constant():
    assert (draw(Constant(0.5), 1, "n", (7,), (3,), (4,)) == np.full(4, 0.5, np.float32)).all()
