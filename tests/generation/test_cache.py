"""The cache by itself: what is written is there, wherever its memory came from."""

import numpy as np
import paddle

from ppfleetx.generation.cache import GrowingCache


def test_a_column_is_written_over_after_the_first_pass() -> None:
    """The first keys come as the model leaves them, which may be a view with its axes exchanged."""
    cache = GrowingCache()
    first = paddle.randn([5, 2, 3, 4]).transpose([1, 2, 0, 3])
    before = first.numpy()
    cache.extend(5, np.ones((2, 5), dtype=bool))
    cache.update(0, first, first + 1)
    cache.shorten(3)
    new = paddle.randn([2, 3, 1, 4])
    cache.extend(1, np.ones((2, 4), dtype=bool))
    keys, values, penalty = cache.update(0, new, new + 1)
    expected = np.concatenate([before[:, :, :3], new.numpy()], axis=2)
    np.testing.assert_array_equal(keys.numpy()[:, :, :4], expected)
    np.testing.assert_array_equal(values.numpy()[:, :, :4], expected + 1)
    assert (penalty.numpy()[..., :4] == 0).all()
    assert (penalty.numpy()[..., 4:] < -1e8).all()
