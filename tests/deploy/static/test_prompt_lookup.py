"""Prompt lookup in an exported program: the drafts, and how they are used."""

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections.root import GenerationConfig, ModelConfig
from ppfleetx.deploy.static.program import INPUTS, GenerationProgram
from ppfleetx.deploy.static.sampling import FEWEST_ALIKE, drafts_after, last_occurrence, nucleus_by_buckets
from ppfleetx.generation import speculative_decoding
from ppfleetx.generation.decoding_session import NextTokenModel
from tests.deploy.exports import GPT2_STYLE, Exported
from tests.models.gpt_builders import build

TEXT = "hat and hat and hat and"


def guessed(history: list[int], count: int) -> list[int]:
    tokens = paddle.to_tensor(history, "int64")
    place, alike = last_occurrence(tokens)
    return (
        drafts_after(tokens, place, paddle.to_tensor([count], "int64")).tolist()
        if alike >= FEWEST_ALIKE
        else []
    )


def test_guesses_are_those_of_the_generator() -> None:
    generator, found = np.random.default_rng(0), 0
    for _ in range(300):
        history = generator.integers(0, 4, generator.integers(2, 14))
        expected = speculative_decoding.look_up(history, 6).tolist()
        assert guessed(history.tolist(), 6) == expected, history
        found += bool(expected)
    assert 50 < found < 250


@pytest.mark.slow_after(1)
def test_tokens_of_a_single_prompt_are_those_without_guesses(each: Exported) -> None:
    """Also at the last position of the model, which the second to last text gets to."""
    texts = ["the cat", "hat and hat and hat and hat and", "a", "é" * 29, "cat cat cat cat"]
    plain, *guessing = (
        GenerationConfig(decode_strategy="greedy_search", prompt_lookup_num_tokens=drafts)
        for drafts in (0, 1, 3, 16)
    )
    expected = each.generator.generate(texts, plain)
    for options in (plain, *guessing):
        assert each.engine.generate(texts, options, batch_rows=1) == expected
    assert len(expected[3][0].ids) == 6


def test_a_row_ends_at_its_end_token(exported: Exported) -> None:
    program, tokens = exported.engine._program, exported.generator.tokenizer.encode(TEXT)
    row = program.run(inputs(tokens, most_guesses=0)).tolist()[0]
    for end in row:
        expected = row[: row.index(end) + 1]
        assert program.run(inputs(tokens, end_ids=end)).tolist() == [expected]


class Cycle(GenerationProgram):
    """The program with a model that counts from 1 to 9 again and again; it counts its passes."""

    def __init__(self) -> None:
        super().__init__(NextTokenModel(build(ModelConfig(**GPT2_STYLE), 5), 300), 64, use_panels=True)
        self.passes: list[int] = []

    def _run_model(
        self, state: tuple[paddle.Tensor, ...], cache: object, last_only: bool = True
    ) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
        tokens, positions = state[:2]
        self.passes.append(tokens.shape[1])
        assert positions.numpy().max() < self.max_positions
        following = paddle.nn.functional.one_hot(tokens[0] % 9 + 1, 10)
        return following[-1:] if last_only else following, []

    def run(self, tokens: list[int], **options: int) -> list[int]:
        values = inputs(tokens, **options)
        self.passes = []
        return self(*(paddle.to_tensor(values[name]) for name, _, _ in INPUTS))[0].tolist()


COUNTED = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]


def test_right_guesses_save_passes() -> None:
    program = Cycle()
    expected = [(2 + i) % 9 + 1 for i in range(40)]
    assert program.run(COUNTED, most_guesses=0) == expected
    assert program.passes[1:] == [1] * 39
    assert program.run(COUNTED) == expected
    assert program.passes[1:] == [2, 3, 5, 9, 17, 3]
    assert program.run(COUNTED, most_guesses=3) == expected
    assert program.passes[1:4] == [2, 3, 4]
    assert program.run(COUNTED, min_new_tokens=4) == expected
    assert program.passes[1:7] == [1, 1, 1, 2, 3, 5]


@pytest.mark.parametrize("end", range(1, 10))
def test_the_end_may_be_a_guess(end: int) -> None:
    """Nothing that was right behind it is kept."""
    program = Cycle()
    found = program.run(COUNTED, end_ids=end)
    assert found == [(2 + i) % 9 + 1 for i in range(40)][: len(found)]
    assert found.index(end) == len(found) - 1


def test_the_last_position_of_the_model() -> None:
    program = Cycle()
    assert len(program.run(COUNTED * 5, max_new_tokens=9)) == 9
    assert len(program.run([*COUNTED * 5, 3, 4, 5, 6, 7, 8], max_new_tokens=3)) == 3


def inputs(tokens: list[int], **given: int) -> dict[str, np.ndarray]:
    """Of greedy search for one prompt."""
    values = {
        "max_new_tokens": 40,
        "end_ids": -1,
        "min_new_tokens": 0,
        "top_k": 1,
        "most_guesses": 16,
        **given,
    }
    return {
        "tokens": np.array([tokens]),
        "padding": np.zeros(1, np.int64),
        "exponentials": np.ones([1, 1, 1], np.float32),
        **{name: np.ones(1, np.float32) for name in ("repetition_penalty", "temperature", "top_p")},
        **{name: np.array([value]) for name, value in values.items()},
    }


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
