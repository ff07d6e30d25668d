"""Sampling draws from the distribution it says."""

import numpy as np
import paddle
import pytest

from ppfleetx.generation import gumbel_sampling as draws_module
from ppfleetx.generation.gumbel_sampling import RandomStream, draw, race_size
from ppfleetx.generation.logits_processors import candidates
from ppfleetx.generation.sampling_params import PLAIN, SamplingParams, chosen

LOGITS = np.array([1.2, -0.3, 0.7, 2.1, 0.0, -2.0, 1.9, 0.4, -1.0, 1.5], dtype=np.float32)
PLAIN_OPTIONS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
FIRST_NUMBERS = [0.77971995, 1.19214952, 0.3154473, 0.16403921]
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


def numbers_of(seed: int, rows: int, vocab: int, step: int = 0) -> np.ndarray:
    return np.concatenate([RandomStream(seed, row, 0, vocab).numbers(step) for row in range(rows)])


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_chi_square(options: dict) -> None:
    draws = 20_000
    logits, numbers = paddle.to_tensor(np.tile(LOGITS, (draws, 1))), numbers_of(3, draws, len(LOGITS))
    tokens = chosen(logits, SamplingParams(**options), numbers).numpy()
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
    full = {**PLAIN_OPTIONS, **options}
    weights = candidates(paddle.to_tensor(logits), **full).numpy()
    result = weights / weights.sum(-1, keepdims=True)
    expected = np.stack([expected_distribution(row, **options) for row in logits])
    np.testing.assert_allclose(result, expected, atol=2e-7)


def test_top_p_of_a_flat_and_of_a_peaked_row() -> None:
    logits = np.random.default_rng(0).normal(0, 0.01, (2, 6000)).astype(np.float32)
    logits[1, 17] = 30.0
    weights = candidates(paddle.to_tensor(logits), temperature=1.0, top_k=0, top_p=0.9)
    for row in range(2):
        expected = np.flatnonzero(expected_distribution(logits[row], top_p=0.9))
        # Rounding of 6000 summands in float32 may move the border by a token or two.
        assert len(set(np.flatnonzero(weights.numpy()[row])) ^ set(expected)) <= 2 * (row == 0)


def test_top_p_keeps_no_more_of_equal_tokens_than_it_needs() -> None:
    logits = paddle.to_tensor([[0.0] * 8, [1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    weights = candidates(logits, temperature=1.0, top_k=0, top_p=0.5)
    assert [np.flatnonzero(row).tolist() for row in weights.numpy()] == [[0, 1, 2, 3], [1]]
    weights = candidates(logits, temperature=1.0, top_k=0, top_p=0.9)
    assert [np.flatnonzero(row).tolist() for row in weights.numpy()] == [list(range(8)), [0, 1]]


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-300}, {"top_p": 1e-300}, {"top_p": 1e-300, "top_k": 3}]
)
def test_options_beyond_float32_leave_the_likeliest_token(options: dict) -> None:
    logits = paddle.to_tensor([[0.5, 3.0, -1.0, 2.9999], [-300.0, -700.0, 250.0, 249.0]])
    weights = candidates(logits, **PLAIN_OPTIONS | options)
    for prompt in range(200):
        numbers = np.repeat(RandomStream(1, prompt, 0, 4).numbers(0), 2, axis=0)
        assert draw(weights, paddle.to_tensor(numbers)).tolist() == [1, 2]


@pytest.mark.slow
def test_tokens_of_many_blocks_are_drawn_as_often_as_they_should_be() -> None:
    """Of 300 tokens, two of the three blocks of which are not full of likely ones."""
    draws, vocab = 40_000, 300
    weights = np.random.default_rng(1).random(vocab).astype(np.float32)
    weights[130:256:2] = 0.0
    numbers = paddle.to_tensor(numbers_of(5, draws, vocab, step=2))
    tokens = draw(paddle.to_tensor(np.tile(weights, (draws, 1))), numbers).numpy()
    counts, expected = np.bincount(tokens, minlength=vocab), weights / weights.sum() * draws
    assert counts[weights == 0].sum() == 0
    kept = weights > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert statistic < 310  # 99.9% quantile of chi-square with 236 degrees of freedom


def test_host_and_operations_draw_the_same() -> None:
    for vocab in (50_304, 700, 128, 61):
        logits = np.random.default_rng(vocab).normal(0, 3, (64, vocab)).astype(np.float32)
        numbers = numbers_of(2, 64, vocab)
        assert numbers.shape == (64, race_size(vocab))
        weights, numbers = candidates(paddle.to_tensor(logits), **PLAIN_OPTIONS), paddle.to_tensor(numbers)
        found = draws_module.draw_by_operations(weights, numbers).tolist()
        assert draw(weights, numbers).tolist() == found
        assert max(found) < vocab and len(set(found)) > 8


def test_last_bits_of_logits_do_not_change_what_is_drawn() -> None:
    """400 draws from a vocabulary of 50,304: products of other sizes move logits by as much."""
    rng = np.random.default_rng(0)
    for _ in range(2):
        logits = rng.normal(0, 2.5, (200, 50_304)).astype(np.float32)
        moved = (logits + rng.normal(0, 2e-6, logits.shape)).astype(np.float32)
        numbers = numbers_of(3, 200, 50_304)
        first, second = (chosen(paddle.to_tensor(one), PLAIN, numbers) for one in (logits, moved))
        assert (first != second).sum().item() == 0


def test_numbers_are_a_function_of_seed_row_and_step() -> None:
    stream = RandomStream(1, 0, 0, 50_304)
    whole = stream.numbers(0, 9)
    for step in (4, 5, 0, 8):  # in any order
        np.testing.assert_array_equal(stream.numbers(step), whole[step : step + 1])
    for other in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        assert (RandomStream(*other, 50_304).numbers(0, 9) == whole).mean() < 0.01
    assert whole.min() > 0 and abs(whole.mean() - 1.0) < 0.05
    # They stay what they are, on every machine: -ln((word + 1/2) / 2 ** 32) of Philox 4x64-10.
    np.testing.assert_allclose(whole[0, :4], FIRST_NUMBERS, rtol=2e-7)


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_broken_model_chooses_tokens_that_exist(top_k: int) -> None:
    weights = candidates(paddle.full([2, 50], np.nan), **PLAIN_OPTIONS | {"top_k": top_k})
    numbers = paddle.to_tensor(RandomStream(0, 0, 0, 50).numbers(0, 2))
    for tokens in (draw(weights, numbers), draws_module.draw_by_operations(weights, numbers)):
        assert 0 <= tokens.min().item() <= tokens.max().item() < 50
