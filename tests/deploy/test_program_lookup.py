"""What an exported program guesses, and what it does with it."""

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections import GenerationConfig
from ppfleetx.deploy.program_lookup import accept, guess, next_width
from ppfleetx.generation import lookup
from tests.deploy.exports import Exported


def guessed(history: list[int], count: int) -> list[int]:
    return guess(paddle.to_tensor(history, "int64"), paddle.to_tensor([count], "int64")).tolist()


def test_guesses_are_those_of_the_generator() -> None:
    generator, compared = np.random.default_rng(0), 0
    for _ in range(300):
        history = generator.integers(0, 4, generator.integers(2, 14))
        expected = lookup.guess(history, 6).tolist()
        if expected:  # the generator has none for an end that is new
            assert guessed(history.tolist(), 6) == expected, history
            compared += 1
    assert compared > 80


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([5, 6, 7, 6], [7, 6, 7]),  # a single token that occurred
        ([1, 2, 3], [3, 3, 3]),  # none: it is repeated
        ([4, 4], [4, 4, 4]),
    ],
)
def test_there_is_always_a_guess(history: list[int], expected: list[int]) -> None:
    assert guessed(history, 3) == expected


@pytest.mark.parametrize(
    ("likeliest", "guesses", "expected"),
    [([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 3], 1), ([1, 2, 3], [2, 2], 0), ([7, 7], [7], 1)],
)
def test_guesses_are_right_up_to_the_first_wrong_one(
    likeliest: list[int], guesses: list[int], expected: int
) -> None:
    assert accept(paddle.to_tensor(likeliest), paddle.to_tensor(guesses)).tolist() == [expected]


@pytest.mark.parametrize(("width", "right", "expected"), [(2, 2, 4), (8, 8, 12), (4, 3, 3), (4, 0, 1)])
def test_more_is_guessed_after_success(width: int, right: int, expected: int) -> None:
    width, right, most = (paddle.to_tensor([number]) for number in (width, right, 12))
    assert next_width(width, right, most).tolist() == [expected]


@pytest.mark.parametrize("most", [1, 3, 16])
def test_tokens_of_a_single_prompt_are_those_without_guesses(either: Exported, most: int) -> None:
    """Also at the last position of the model, which the second to last text gets to."""
    texts = ["the cat", "hat and hat and hat and hat and", "a", "é" * 29, "cat cat cat cat"]
    plain, ours = (
        GenerationConfig(decode_strategy="greedy_search", prompt_lookup_num_tokens=guesses)
        for guesses in (0, most)
    )
    expected = either.generator.generate(texts, plain)
    assert either.engine.generate(texts, ours, batch_rows=1) == expected
    assert either.engine.generate(texts, plain, batch_rows=1) == expected
    assert len(expected[3][0].ids) == 6


@pytest.mark.parametrize("place", range(1, 12))
def test_a_row_ends_at_its_end_token(exported: Exported, place: int) -> None:
    """Any token may be the end: also one that a guess was right about, or that follows such a one."""
    program, generator = exported.engine._program, exported.generator
    cfg = GenerationConfig(decode_strategy="greedy_search", max_dec_len=40)
    [[row]] = generator.generate(["hat and hat and hat and"], cfg)
    end = row.ids[place]
    inputs = {
        "tokens": np.array([generator.tokenizer.encode("hat and hat and hat and")]),
        "padding": np.zeros(1, np.int64),
        "max_new_tokens": np.array([40]),
        "uniforms": np.zeros([1, 1], np.float32),
        "end_id": np.array([end]),
        "min_new_tokens": np.array([0]),
        "repetition_penalty": np.ones(1, np.float32),
        "temperature": np.ones(1, np.float32),
        "top_k": np.array([1]),
        "top_p": np.ones(1, np.float32),
        "most_guesses": np.array([16]),
    }
    assert program.run(inputs).tolist() == [list(row.ids[: row.ids.index(end) + 1])]
