"""Guessed tokens change how often the model is run, and not what it gives."""

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import GenerationConfig
from ppfleetx.data.tokenizer.json_files import BYTE_CHARACTERS, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation import continuous_batching
from ppfleetx.generation.continuous_batching import ContinuousBatch
from ppfleetx.generation.decode_loop import Rules, decode
from ppfleetx.generation.decoding_session import DecodingSession, NextTokenModel
from ppfleetx.generation.generator import Generator
from ppfleetx.generation.sampling_params import SamplingParams
from ppfleetx.generation.speculative_decoding import Assistant, ProposedRows, decode_with_drafts, look_up
from ppfleetx.generation.text_io import NoTokenizer

CYCLE = [4, 8, 15, 16, 23, 4, 8, 15, 16, 23, 4, 8]
NEW = 40
NANO = Path(__file__).resolve().parents[2] / "ppfleetx/configs/debug/gpt_nano.yaml"


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
    assert look_up(np.array(history), count).tolist() == expected


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("prompts", [[CYCLE], [CYCLE, [3, 1], [5], CYCLE[:7], [9, 9, 9, 9]]])
def test_tokens_are_those_without_guesses(model, prompts):
    next_token, limits = NextTokenModel(model, 61), [NEW - 7 * row for row in range(len(prompts))]
    for rules in (
        Rules(),
        Rules((7, 3, 20), 5, SamplingParams(repetition_penalty=1.2), forced_eos_id=60),
        Rules((11, 9), forced_bos_id=2),
        Rules((9,), 0, SamplingParams(no_repeat_ngram_size=4, bad_words=((3, 5),), frequency_penalty=0.1)),
    ):
        with paddle.no_grad():
            session = DecodingSession(next_token, prompts, use_cache=True)
            expected = decode(session, rules, limits)
            for most in (1, 5, 16):
                assert decode_with_drafts(next_token, prompts, rules, limits, most) == expected


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("which", ["itself", "noisy", "another", "itself, shorter"])
@pytest.mark.parametrize("prompts", [[CYCLE], [[3, 1], CYCLE, [5], CYCLE[:7], [9, 9, 9, 9]]])
def test_tokens_are_those_without_an_assistant(make_model, prompts, which):
    """Of assistants that are always right, sometimes, hardly ever, or until the row is too long for them."""
    (model, _), (helper, _) = make_model(), make_model()
    noise = {"noisy": 0.02, "another": 1.0}.get(which, 0.0)
    for own, parameter in zip(model.parameters(), helper.parameters(), strict=True):
        parameter.set_value(own + noise * paddle.randn(own.shape))
    counting, limits = Counting(model), [NEW - 7 * row for row in range(len(prompts))]
    longest = 30 if which == "itself, shorter" else 1000
    assistant = Assistant(NextTokenModel(helper, 61), longest, NoTokenizer(61))
    with paddle.no_grad():
        for rules in (Rules(), Rules((7, 3, 20), 5, SamplingParams(repetition_penalty=1.2))):
            session = DecodingSession(NextTokenModel(model, 61), prompts, use_cache=True)
            expected = decode(session, rules, limits)
            counting.passes.clear()
            rows = ProposedRows(assistant)
            assert decode_with_drafts(counting, prompts, rules, limits, 8, assistant=rows) == expected
    if which == "itself" and len(prompts) == 1:
        [plain] = expected
        assert len(counting.passes) < len(plain.ids)


def test_an_assistant_has_the_same_tokens(make_model, tokenizer, tmp_path):
    model, cfg = make_model(vocab_size=300)
    other = make_definition({character: i for i, character in enumerate(BYTE_CHARACTERS)}, [], ["<end>"])
    options = GenerationConfig(decode_strategy="greedy_search", max_dec_len=NEW, assistant_model="small")

    def load(place: str, its: Tokenizer | NoTokenizer) -> Assistant:
        assert place == "small"
        return Assistant(NextTokenModel(model, 300), 64, its)

    for its in (Tokenizer(other, eod_token="<end>"), NoTokenizer(300)):
        generator = Generator(model, cfg, tokenizer, load_assistant=partial(load, its=its))
        with pytest.raises(ConfigError, match=r"Generation\.assistant_model.*token"):
            generator.generate(["the cat"], options)
    with pytest.raises(ConfigError, match="takes no assistant"):
        Generator(model, cfg, tokenizer).generate(["the cat"], options)
    with pytest.raises(ConfigError, match="decode_strategy"):
        load_config(NANO, ["Generation.assistant_model=small", "Generation.decode_strategy=sampling"])
    generator = Generator(model, cfg, tokenizer, load_assistant=partial(load, its=tokenizer))
    plain = GenerationConfig(decode_strategy="greedy_search", max_dec_len=NEW, prompt_lookup_num_tokens=0)
    assert generator.generate(["the cat", "a"], options) == generator.generate(["the cat", "a"], plain)


def test_columns_of_wrong_guesses_are_taken_out(model, monkeypatch):
    """Rows that are right in turns leave holes in their columns, and tokens stay the likeliest."""
    monkeypatch.setattr(continuous_batching, "_MOST_UNUSED", 3)
    next_token, prompts, steps = NextTokenModel(model, 61), [[3, 1], [8, 2, 1, 5]], 10
    with paddle.no_grad():
        session = DecodingSession(next_token, prompts, use_cache=True)
        texts = [row.ids for row in decode(session, Rules(), [40, 40])]
        batch, lengths, known = ContinuousBatch(next_token), [], [1, 1]
        batch.join(prompts, [1, 1])
        assert batch.next_logits().argmax(-1).tolist() == [text[0] for text in texts]
        batch.append([text[:1] for text in texts])
        for step in range(steps):
            right = [text[n : n + 3] for text, n in zip(texts, known, strict=True)]
            wrong = [[(token + 1) % 61 for token in own] for own in right]
            likeliest = batch.logits_with_drafts(
                [right[row] if row == step % 2 else wrong[row] for row in (0, 1)]
            ).argmax(-1)
            new = [4 if row == step % 2 else 1 for row in (0, 1)]
            tokens = [likeliest[: new[row], row].tolist() for row in (0, 1)]
            assert tokens == [text[n : n + more] for text, n, more in zip(texts, known, new, strict=True)]
            batch.append(tokens)
            known = [n + more for n, more in zip(known, new, strict=True)]
            lengths.append(batch._cache.length)
    most = max(map(len, batch.history))
    assert most < max(lengths) <= most + 3 + most // 4 + 4
    assert any(after < before for before, after in itertools.pairwise(lengths))


def test_right_guesses_save_passes_and_wrong_ones_are_dropped(make_model):
    model, _ = make_model()
    counting = Counting(model)
    with paddle.no_grad():
        # Greedy text of such a model runs into a cycle; CYCLE itself is not continued, a wrong guess.
        [row] = decode_with_drafts(counting, [CYCLE], Rules(), [NEW], 16)
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
