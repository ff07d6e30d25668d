"""Prompts that begin like earlier rows, scores of tokens, and penalties by hand."""

import random

import numpy as np
import paddle
import pytest

from ppfleetx.generation import continuous_batching, prefix_cache
from ppfleetx.generation.continuous_batching import ContinuousBatch
from ppfleetx.generation.decoding_session import NextTokenModel
from ppfleetx.generation.prefix_cache import PrefixStore
from ppfleetx.generation.sampling import RowChoice, choose_tokens, score_prompt, score_tokens
from ppfleetx.generation.sampling_params import RowTokens, SamplingParams
from tests.generation.conftest import LONGROPE_STYLE
from tests.generation.test_continuous import some_tokens, step


@pytest.mark.parametrize("seed", [1, 3])
def test_known_beginnings_change_no_logits(
    make_model, style: dict, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats whose turns go on from what was said, new ones under a shared beginning, copies and drafts."""
    monkeypatch.setattr(continuous_batching, "_PREFILL_COLUMNS", 4)
    monkeypatch.setattr(prefix_cache, "SHORTEST", 2)
    staged, _ = make_model(**style)
    chance, store = random.Random(seed), PrefixStore(60)
    batch = ContinuousBatch(NextTokenModel(staged, 61), store)
    shared, ended = [chance.randrange(61) for _ in range(6)], [[7, 8, 9]]
    with paddle.no_grad():
        for _ in range(16):
            prompts = [shared + some_tokens(chance, 1, n) for n in (5, 3)]
            prompts.append(chance.choice(ended) + some_tokens(chance, 1, 2))
            step(staged, batch, chance, 0.5, prompts, [1, chance.choice([1, 3]), 1])
            going_on = [
                row for row, one in enumerate(batch.history) if len(one) < 40 and chance.random() < 0.6
            ]
            ended += [one for row, one in enumerate(batch.history) if row not in going_on and len(one) < 40]
            batch.select(going_on)
            assert store.num_tokens <= 60
    assert store.num_reused > 60


@pytest.mark.parametrize("seed", [1, 3])
def test_short_rows_do_not_begin_long_ones(make_model, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_known_beginnings_change_no_logits(make_model, LONGROPE_STYLE, seed, monkeypatch)


def test_what_was_used_least_recently_goes_first() -> None:
    store = PrefixStore(50)
    known = {name: [number] * 20 for number, name in enumerate("abc")}
    store.put(known["a"], {})
    assert not store.wants(known["a"] + [9] * 15)
    assert store.wants(known["a"] + [9] * 16)
    store.put(known["b"], {})
    assert store.groups([known["a"] + [5]])[0].length == 20, "it is used"
    store.put(known["c"], {})
    lengths = [group.length for name in "abc" for group in store.groups([known[name] + [5]])]
    assert lengths == [20, 0, 20]
    store.put(known["a"] + [9] * 5, {})
    assert store.num_tokens == 45, "a longer one stands for what it begins with"
    found = store.groups([known["a"] + [1], known["a"] + [2], [8] * 30, known["c"][:18]])
    assert [(group.length, len(group.prompts)) for group in found] == [(20, 2), (0, 1), (17, 1)]


def test_scores_are_those_of_the_full_forward(make_model) -> None:
    staged, _ = make_model(max_position_embeddings=256)
    row = np.random.default_rng(3).integers(0, 61, 140).tolist()
    with paddle.no_grad():
        scores = score_prompt(NextTokenModel(staged, 61), row, 3)
        logits = staged(paddle.to_tensor([row]), paddle.arange(len(row)).unsqueeze(0), None)
        expected = np.asarray(logits[:, 0, :61].numpy(), np.float64)
    expected -= expected.max(-1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    assert scores[0].logprob is None
    for place, score in enumerate(scores[1:]):
        assert score.token == row[place + 1]
        assert score.logprob == pytest.approx(expected[place, score.token], abs=1e-4)
        assert [token for token, _ in score.top] == np.argsort(-expected[place])[:3].tolist()
        for token, logprob in score.top:
            assert logprob == pytest.approx(expected[place, token], abs=1e-4)


def test_penalties_count_what_was_generated() -> None:
    logits = paddle.to_tensor([[5.0, 4.9, 4.5, 1.0]] * 4)
    history = [0, 0, 0, 1, 1]  # the first three are the prompt
    greedy = {"temperature": 0.0}
    choices = [
        RowChoice(SamplingParams(**greedy, presence_penalty=0.2), RowTokens(history, 2)),
        RowChoice(SamplingParams(**greedy, presence_penalty=0.6), RowTokens([*history, 0], 3)),
        RowChoice(SamplingParams(**greedy, frequency_penalty=0.3), RowTokens([*history, 0], 3)),
        RowChoice(SamplingParams(**greedy, frequency_penalty=-0.1), RowTokens(history, 2)),
    ]
    assert choose_tokens(logits, choices) == [0, 2, 0, 1]
    scored = score_tokens(logits, [0, 1, 2, 3], 2)
    assert [one.token for one in scored] == [0, 1, 2, 3]
    assert scored[3].top[0][0] == 0
