"""Rows that join and leave a batch, against the same rows alone."""

import random

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections.generation import TokenOptions
from ppfleetx.config.sections.root import GenerationConfig
from ppfleetx.generation import continuous_batching
from ppfleetx.generation.continuous_batching import ContinuousBatch
from ppfleetx.generation.decoding_session import DecodingSession, NextTokenModel
from ppfleetx.generation.generator import Generator
from ppfleetx.generation.gumbel_sampling import RandomStream
from ppfleetx.generation.sampling import RowChoice, choose_tokens
from ppfleetx.generation.sampling_params import RowTokens, SamplingParams
from ppfleetx.models.staged_model import StagedModel
from tests.generation.conftest import LONGROPE_STYLE

PROMPTS = [[5, 9, 11], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8], [60, 0]]


def alone(model: NextTokenModel, prompt: list[int], steps: int) -> tuple[list[int], list[np.ndarray]]:
    """The likeliest tokens and all logits of a prompt from the plain forward pass."""
    session = DecodingSession(model, [prompt], use_cache=False)
    tokens, logits = [], []
    for _ in range(steps):
        logits.append(session.next_logits().numpy()[0])
        tokens.append(int(logits[-1].argmax()))
        session.append(np.array(tokens[-1:]))
    return tokens, logits


@pytest.mark.parametrize("columns", [continuous_batching._PREFILL_COLUMNS, 3], ids=["whole", "pieces"])
def test_rows_that_come_and_go_have_the_logits_they_have_alone(
    make_model, style: dict, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer and shorter rows join a running batch, the longest leaves it, and all of them leave."""
    monkeypatch.setattr(continuous_batching, "_PREFILL_COLUMNS", columns)
    staged, _ = make_model(**style)
    model = NextTokenModel(staged, 61)
    events = [([0, 1], []), ([2], []), ([], [1]), ([3], [2]), ([], []), ([], [0, 3]), ([4], [])]
    with paddle.no_grad():
        expected = [alone(model, prompt, len(events)) for prompt in PROMPTS]
        batch, present, done = ContinuousBatch(model), [], [0] * len(PROMPTS)
        for joining, leaving in events:
            batch.join([PROMPTS[row] for row in joining], [1] * len(joining))
            present += joining
            logits = batch.next_logits().numpy()
            assert len(logits) == len(present)
            for row, of_row in zip(present, logits, strict=True):
                np.testing.assert_allclose(of_row, expected[row][1][done[row]], rtol=2e-4, atol=2e-5)
                done[row] += 1
            batch.append(logits.argmax(-1, keepdims=True).tolist())
            for row, history in zip(present, batch.history, strict=True):
                assert history == PROMPTS[row] + expected[row][0][: done[row]]
            staying = [place for place, row in enumerate(present) if row not in leaving]
            batch.select(staying)
            present = [present[place] for place in staying]
    assert done == [6, 3, 3, 3, 1]


def some_tokens(chance: random.Random, least: int, most: int) -> list[int]:
    return [chance.randrange(61) for _ in range(chance.randint(least, most))]


def step(
    staged: StagedModel,
    batch: ContinuousBatch,
    chance: random.Random,
    share: float,
    prompts: list[list[int]],
    copies: list[int],
) -> None:
    """One step in which prompts join or rows are guessed for, with the logits of the full forward pass."""
    drafts: list[list[int]] = [[] for _ in batch.history]
    if not drafts or chance.random() < share:
        batch.join(prompts, copies)
        drafts = [[] for _ in batch.history]
        logits = batch.next_logits().unsqueeze(0).numpy()
    else:
        drafts = [some_tokens(chance, 0, 4)[: batch.max_drafts] for _ in drafts]
        logits = batch.logits_with_drafts(drafts).numpy()
    for row, (history, own) in enumerate(zip(batch.history, drafts, strict=True)):
        ids = paddle.to_tensor([history + own])
        expected = staged(ids, paddle.arange(ids.size).unsqueeze(0), None)[len(history) - 1 :, 0, :61].numpy()
        np.testing.assert_allclose(logits[: len(expected), row], expected, rtol=2e-4, atol=5e-5)
    batch.append([own[: chance.randint(0, len(own))] + some_tokens(chance, 1, 1) for own in drafts])


@pytest.mark.parametrize("seed", [0, 2])
def test_any_course_of_events_gives_the_logits_of_the_full_forward(
    make_model, style: dict, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts join with copies, rows are guessed for rightly and wrongly, leave and change places."""
    monkeypatch.setattr(continuous_batching, "_PREFILL_COLUMNS", 4)
    monkeypatch.setattr(continuous_batching, "_MOST_UNUSED", seed)
    staged, _ = make_model(**style)
    chance, batch = random.Random(seed), ContinuousBatch(NextTokenModel(staged, 61))
    with paddle.no_grad():
        for _ in range(14):
            prompts = [some_tokens(chance, 1, 9), some_tokens(chance, 1, 9)]
            step(staged, batch, chance, 0.3, prompts, [chance.choice([1, 3]), 1])
            going_on = [row for row, history in enumerate(batch.history) if len(history) < 50]
            chance.shuffle(going_on)
            batch.select(going_on[: chance.choice([2, 4, 6])])


def test_a_window_counts_the_tokens_of_the_row(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of padding and of wrong drafts between a row's own do not use up its window."""
    blocks = {"attention_window": 4, "qk_layernorm": True, "parallel_residual": True}
    style = {"position_embedding_type": "rope", **blocks}
    test_any_course_of_events_gives_the_logits_of_the_full_forward(make_model, style, 0, monkeypatch)


@pytest.mark.parametrize("seed", [0, 2])
def test_rows_that_become_long_are_run_anew(make_model, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_any_course_of_events_gives_the_logits_of_the_full_forward(
        make_model, LONGROPE_STYLE, seed, monkeypatch
    )


def test_an_assistant_takes_back_what_made_a_row_long(make_model) -> None:
    """Its proposals go past the length at which angles change, and all of them are wrong."""
    staged, _ = make_model(**LONGROPE_STYLE)
    model = NextTokenModel(staged, 61)
    batch, row = ContinuousBatch(model), PROMPTS[2]
    with paddle.no_grad():
        for new in ([1, 2, 3], [], [4], [5, 6]):
            logits = batch.logits_after([row + new, [7]]).numpy()
            for place, one in enumerate((row + new, [7])):
                np.testing.assert_allclose(logits[place], alone(model, one, 1)[1][0], rtol=2e-4, atol=5e-5)


def test_columns_of_rows_that_left_are_given_back(make_model) -> None:
    staged, _ = make_model()
    batch = ContinuousBatch(NextTokenModel(staged, 61))
    with paddle.no_grad():
        batch.join([PROMPTS[2], PROMPTS[1]], [1, 2])
        assert batch.next_logits().shape == [3, 61]
        assert batch._cache.length == len(PROMPTS[2])
        batch.select([1, 2])
        assert batch._cache.length == len(PROMPTS[1])
        batch.select([])
        assert batch._cache.length == 0


@pytest.mark.parametrize(
    "options",
    [
        {"decode_strategy": "greedy_search"},
        {"decode_strategy": "greedy_search", "repetition_penalty": 1.5},
        {"temperature": 0.7},
        {"top_k": 5, "top_p": 0.8, "repetition_penalty": 1.3},
        {"top_p": 0.6, "temperature": 1.4},
        {"min_p": 0.05, "typical_p": 0.9, "frequency_penalty": 0.4, "presence_penalty": -0.2},
        {"temperature": 0.0, "no_repeat_ngram_size": 2, "suppress_tokens": (7, 11)},
        {"logit_bias": {32: 4.0, 104: -2.5}, "bad_words": ("the", "at")},
    ],
)
def test_mixed_options_give_each_row_what_the_generator_gives_it(make_model, tokenizer, options) -> None:
    """Neighbors with other options change nothing; random numbers are the generator's."""
    staged, cfg = make_model(vocab_size=300)
    neighbors = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=3, repetition_penalty=2.0),
    ]
    keys = {key: value for key, value in options.items() if key != "decode_strategy"}
    greedy = {"temperature": 0.0} if "decode_strategy" in options else {}
    section = GenerationConfig(max_dec_len=12, min_dec_len=12, seed=9, **options)
    mine = SamplingParams.of(TokenOptions(**greedy, **keys), tokenizer, tokenizer.end_ids)
    [[expected]] = Generator(staged, cfg, tokenizer).generate([PROMPTS[0]], section)

    batch = ContinuousBatch(NextTokenModel(staged, tokenizer.vocab_size))
    stream = RandomStream(9, 0, 0, tokenizer.vocab_size)
    with paddle.no_grad():
        batch.join(PROMPTS[:4], [1] * 4)
        for step in range(12):
            choices = [
                RowChoice(
                    row_options,
                    RowTokens(batch.history[row], step),
                    stream.numbers(step)[0],
                    tokenizer.end_ids if row == 0 else (),
                )
                for row, row_options in enumerate([mine, *neighbors])
            ]
            batch.append([[token] for token in choose_tokens(batch.next_logits(), choices)])
    assert tuple(batch.history[0][len(PROMPTS[0]) :]) == expected.ids
