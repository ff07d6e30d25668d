"""Log probabilities and likeliest tokens, against NumPy in float64."""

import numpy as np
import paddle
import pytest

from ppfleetx.nn.loss import token_loss, token_scores

S, B, V, TRUE = 70, 3, 40, 37  # 210 positions: more than are looked at together


def example(scale: float = 30.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal([S, B, V]) * scale).astype(np.float32)
    logits[..., TRUE:] += 1000.0  # padding columns count nowhere, however large
    labels = rng.integers(0, TRUE, [B, S])
    labels[:, ::3] = logits[::3, :, :TRUE].argmax(-1).T
    return logits, labels, (rng.random([B, S]) < 0.8).astype(np.float32)


def scores(logits: np.ndarray, labels: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = token_scores(*(paddle.to_tensor(array) for array in (logits, labels, mask)), TRUE)
    return tuple(part.numpy() for part in found)


@pytest.mark.parametrize("scale", [1.0, 30.0])  # with 30 the log probabilities go far below -64
def test_log_probabilities(scale: float) -> None:
    logits, labels, mask = example(scale)
    log_probs, greedy = scores(logits, labels, mask)
    true = logits[..., :TRUE].astype(np.float64)
    norm = np.log(np.exp(true - true.max(-1, keepdims=True)).sum(-1)) + true.max(-1)
    expected = np.take_along_axis(true, labels.T[..., None], -1)[..., 0] - norm
    assert (scale == 1.0) == (expected.min() > -64)
    np.testing.assert_allclose(log_probs, np.where(mask > 0, expected.T, 0.0), rtol=1e-7, atol=1e-6)
    np.testing.assert_array_equal(greedy, (labels == true.argmax(-1).T) | (mask == 0))
    assert log_probs.dtype == np.float64


def test_of_equal_logits_the_first_is_the_likeliest() -> None:
    logits = np.zeros([2, 1, V], np.float32)
    _, greedy = scores(logits, np.array([[0, 1]]), np.ones([1, 2], np.float32))
    assert greedy.tolist() == [[True, False]]


def test_nothing_to_score() -> None:
    logits, labels, mask = example()
    log_probs, greedy = scores(logits, labels, np.zeros_like(mask))
    assert not log_probs.any()
    assert greedy.all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows_where_it_is(value: float) -> None:
    logits, labels, _ = example()
    logits[5, 1, 3] = value
    log_probs, _ = scores(logits, labels, np.ones([B, S], np.float32))
    assert np.argwhere(np.isnan(log_probs)).tolist() == [[1, 5]]


def test_the_loss_of_an_evaluation_is_not_finite_either() -> None:
    logits, labels, mask = example(1.0)
    tensors = [paddle.to_tensor(array) for array in (logits, labels, mask)]
    with paddle.no_grad():
        whole = token_loss(*tensors, TRUE).loss
        expected = -scores(logits, labels, mask)[0].sum()
        assert whole.item() == pytest.approx(expected, rel=1e-5)
        tensors[0][5, 1, 3] = np.nan
        spoilt = token_loss(*tensors, TRUE).loss
    assert np.isnan(spoilt.item())
