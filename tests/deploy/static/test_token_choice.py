"""Where top-p stops, found in buckets."""

import numpy as np
import paddle
import pytest

from ppfleetx.deploy.static.token_choice import nucleus_by_buckets


@pytest.mark.parametrize("scale", [0.0, 0.001, 0.1, 0.6, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("vocab", [7, 300, 20011])
def test_p_is_reached_with_the_last_token_and_not_before(scale: float, vocab: int) -> None:
    """From equal probabilities, which are all in one bucket, to one of nearly 1; sums in float64."""
    logits = np.random.default_rng(3).normal(size=(5, vocab)).astype(np.float32) * scale
    probabilities = paddle.nn.functional.softmax(paddle.to_tensor(logits), axis=-1).numpy()
    rounding = vocab * 2.0**-24  # of a float32 sum of so many terms to 1, one after the other
    for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999, 1.0 - 2**-24):
        weights = nucleus_by_buckets(paddle.to_tensor(probabilities), paddle.full([1], top_p)).numpy()
        kept = weights > 0
        np.testing.assert_array_equal(weights[kept], probabilities[kept])
        smallest = np.where(kept, probabilities, np.inf).min(-1)
        assert (np.where(kept, 0, probabilities).max(-1) <= smallest).all()
        mass = weights.sum(-1, dtype=np.float64)
        assert (mass >= top_p - rounding).all()
        assert (mass - smallest < top_p + rounding).all()


def test_of_equal_ones_the_lower_ids_stay() -> None:
    probabilities = paddle.to_tensor([[0.1, 0.2, 0.2, 0.3, 0.2]])
    weights = nucleus_by_buckets(probabilities, paddle.to_tensor([0.6]))
    np.testing.assert_array_equal(weights.numpy(), np.float32([[0, 0.2, 0.2, 0.3, 0]]))
