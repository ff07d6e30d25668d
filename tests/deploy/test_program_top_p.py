"""Where top-p stops, found in buckets."""

import numpy as np
import paddle
import pytest

from ppfleetx.deploy.program_top_p import last_kept_of_all


@pytest.mark.parametrize("scale", [0.0, 0.001, 0.1, 0.6, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("vocab", [7, 300, 20011])
def test_p_is_reached_with_the_last_token_and_not_before(scale: float, vocab: int) -> None:
    """From equal probabilities, which are all in one bucket, to one of nearly 1; sums in float64."""
    logits = np.random.default_rng(3).normal(size=(5, vocab)).astype(np.float32) * scale
    probabilities = paddle.nn.functional.softmax(paddle.to_tensor(logits), axis=-1)
    falling = -np.sort(-probabilities.numpy(), axis=-1)
    rounding = vocab * 2.0**-24  # of a float32 sum of so many terms to 1, one after the other
    mass = np.cumsum(falling, axis=-1, dtype=np.float64)
    for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999, 1.0 - 2**-24):
        smallest, count = (
            found.numpy() for found in last_kept_of_all(probabilities, paddle.full([1], top_p))
        )
        last = count - 1
        np.testing.assert_array_equal(np.take_along_axis(falling, last, axis=1), smallest)
        reached = np.take_along_axis(mass, last, axis=1)
        assert (reached >= top_p - rounding).all()
        assert (reached - smallest < top_p + rounding).all()
