"""Sampling draws from the distribution it says."""

import numpy as np
import paddle
import pytest

from ppfleetx.generation.processors import candidates, draw
from ppfleetx.generation.search import Sampler, uniforms

LOGITS = np.array([1.2, -0.3, 0.7, 2.1, 0.0, -2.0, 1.9, 0.4, -1.0, 1.5], dtype=np.float32)
CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 10},
    {"top_k": 50},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"top_k": 5, "top_p": 0.7},
    {"top_k": 6, "top_p": 0.85, "temperature": 1.7},
]


def expected_distribution(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """The definition, token by token in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled)[: top_k or None]
    weights = np.exp(scaled[order] - scaled.max())
    weights /= weights.sum()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= top_p:
            break
        kept.append((token, weight))
        mass += weight
    result = np.zeros(len(logits))
    for token, weight in kept:
        result[token] = weight / mass
    return result


@pytest.mark.parametrize("options", CASES, ids=str)
def test_chi_square(options: dict) -> None:
    draws = 20_000
    sampler = Sampler(3, [(row, 0) for row in range(draws)], 1, **options)
    tokens = sampler(paddle.to_tensor(np.tile(LOGITS, (draws, 1))), np.arange(draws), 0).numpy()
    counts = np.bincount(tokens, minlength=len(LOGITS))
    expected = expected_distribution(LOGITS, **options) * draws
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    # 99.9% quantile of chi-square with 9 degrees of freedom, the most there are; the seed is fixed.
    assert statistic < 27.9


@pytest.mark.parametrize("options", CASES, ids=str)
def test_weights_are_the_definition(options: dict) -> None:
    logits = np.stack([LOGITS, LOGITS[::-1], 3 * LOGITS])
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    weights, ids = candidates(paddle.to_tensor(logits), **full)
    weights = weights.numpy()
    columns = np.tile(np.arange(10), (3, 1)) if ids is None else ids.numpy()
    result = np.zeros((3, 10))
    np.put_along_axis(result, columns, weights / weights.sum(-1, keepdims=True), axis=1)
    expected = np.stack([expected_distribution(row, **options) for row in logits])
    np.testing.assert_allclose(result, expected, atol=2e-7)


def test_top_p_of_a_flat_and_of_a_peaked_row() -> None:
    logits = np.random.default_rng(0).normal(0, 0.01, (2, 6000)).astype(np.float32)
    logits[1, 17] = 30.0
    weights, ids = candidates(paddle.to_tensor(logits), temperature=1.0, top_k=0, top_p=0.9)
    assert ids is None
    for row in range(2):
        expected = np.flatnonzero(expected_distribution(logits[row], top_p=0.9))
        # Rounding of 6000 summands in float32 may move the border by a token or two.
        assert len(set(np.flatnonzero(weights.numpy()[row])) ^ set(expected)) <= 2 * (row == 0)


def test_top_p_keeps_no_more_of_equal_tokens_than_it_needs() -> None:
    logits = paddle.to_tensor([[0.0] * 8, [1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    weights, _ = candidates(logits, temperature=1.0, top_k=0, top_p=0.5)
    assert [np.flatnonzero(row).tolist() for row in weights.numpy()] == [[0, 1, 2, 3], [1]]
    weights, _ = candidates(logits, temperature=1.0, top_k=0, top_p=0.9)
    assert [np.flatnonzero(row).tolist() for row in weights.numpy()] == [list(range(8)), [0, 1]]


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-300}, {"top_p": 1e-300}, {"top_p": 1e-300, "top_k": 3}]
)
def test_options_beyond_float32_leave_the_likeliest_token(options: dict) -> None:
    logits = paddle.to_tensor([[0.5, 3.0, -1.0, 2.9999], [-300.0, -700.0, 250.0, 249.0]])
    weights, ids = candidates(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options)
    for uniform in (2**-24, 1 - 2**-24):
        assert draw(weights, ids, paddle.full([2], uniform)).tolist() == [1, 2]


def test_extreme_uniform_numbers_stay_inside_the_support() -> None:
    largest = np.nextafter(np.float32(1), np.float32(0))
    for scale in np.linspace(0.1, 4.0, 500):
        weights = paddle.to_tensor(np.array([[0.0, 0.3, 0.0, 0.7, 0.0]] * 2, dtype=np.float32) * scale)
        chosen = draw(weights, None, paddle.to_tensor(np.array([0.0, largest], dtype=np.float32)))
        assert chosen.tolist() == [1, 3]


def test_streams_differ_and_do_not_depend_on_their_length() -> None:
    first = uniforms(1, 0, 0, 50)
    np.testing.assert_array_equal(first, uniforms(1, 0, 0, 80)[:50])
    for other in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        assert not np.array_equal(first, uniforms(*other, 50))


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_broken_model_chooses_tokens_that_exist(top_k: int) -> None:
    weights, ids = candidates(paddle.full([2, 50], np.nan), temperature=1.0, top_k=top_k, top_p=1.0)
    assert draw(weights, ids, paddle.full([2], 0.5)).max().item() < 50
