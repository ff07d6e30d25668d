"""Guessed tokens change how often the model is run, and not what it gives."""

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections import GenerationConfig
from ppfleetx.generation.generator import Generator
from ppfleetx.generation.lookup import decode_with_lookup, guess
from ppfleetx.generation.search import Rules, Sampler, decode, greedy
from ppfleetx.generation.session import DecodingSession, NextTokenModel

CYCLE = [4, 8, 15, 16, 23, 4, 8, 15, 16, 23, 4, 8]
NEW = 40


class Counting(NextTokenModel):
    """Counts passes, and the positions they were for."""

    def __init__(self, model) -> None:
        super().__init__(model, 61)
        self.passes = []

    def with_cache(self, tokens, *rest):
        self.passes.append(tokens.shape[1])
        return super().with_cache(tokens, *rest)


@pytest.mark.parametrize(
    ("history", "count", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 5, 2, 3], 2, [9, 5]),  # two tokens, where three are not found
        ([1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3], 3, [7, 0, 2]),  # the longer match, though it is older
        ([2, 3, 7, 2, 3, 8, 2, 3], 1, [8]),  # the newest of equals
        ([5, 6, 5, 6, 5, 6], 5, [5, 6, 5, 6, 5]),  # a cycle goes on
        ([9, 9, 9], 3, [9, 9, 9]),
        ([1, 2, 3, 4], 4, []),
        ([1, 2, 1, 2], 0, []),
        ([7], 3, []),
    ],
)
def test_what_is_guessed(history, count, expected):
    assert guess(np.array(history), count).tolist() == expected


@pytest.fixture
def model(make_model, style):
    model, _ = make_model(**style)
    model.eval()
    return model


@pytest.mark.parametrize("end_id", [None, 7])
@pytest.mark.parametrize("most", [1, 5, 16])
@pytest.mark.parametrize("prompt", [CYCLE, [3, 1]])
def test_tokens_are_those_without_guesses(model, prompt, most, end_id):
    for rules in (Rules(end_id), Rules(end_id, 5, 1.2, forced_eos_id=60)):
        for choose in (greedy, Sampler(3, [(0, 0)], NEW, top_k=2, temperature=0.5)):
            with paddle.no_grad():
                session = DecodingSession(NextTokenModel(model, 61), [prompt], use_cache=True)
                [expected] = decode(session, choose, rules, [NEW])
                session = DecodingSession(NextTokenModel(model, 61), [prompt], use_cache=True)
                row = decode_with_lookup(session, choose, rules, NEW, most)
            assert row == expected


def test_right_guesses_save_passes_and_wrong_ones_are_dropped(make_model):
    model, _ = make_model()
    model.eval()
    counting = Counting(model)
    with paddle.no_grad():
        # Greedy text of such a model runs into a cycle; CYCLE itself is not continued, a wrong guess.
        row = decode_with_lookup(DecodingSession(counting, [CYCLE], use_cache=True), greedy, Rules(), NEW, 16)
    assert len(row.ids) == NEW
    assert len(counting.passes) < NEW
    assert max(counting.passes[1:]) > 2
    assert sum(counting.passes[1:]) > NEW - 1


def test_a_stop_text_ends_a_row_among_guesses(make_model, tokenizer):
    model, cfg = make_model(vocab_size=300)
    generator = Generator(model, cfg, tokenizer)
    section = {"decode_strategy": "greedy_search", "max_dec_len": NEW}
    [[free]] = generator.generate(["the cat and the cat"], GenerationConfig(**section))
    stop = free.text[len(free.text) // 2 :][:2]
    results = [
        generator.generate(
            ["the cat and the cat"],
            GenerationConfig(**section, stop=stop, prompt_lookup_num_tokens=most),
        )
        for most in (0, 16)
    ]
    assert results[0] == results[1]
    assert results[0][0][0].finish_reason == "stop"
