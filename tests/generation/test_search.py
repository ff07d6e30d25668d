"""Decoding with a cache gives what the plain forward pass gives, and a row what it gives alone."""

from dataclasses import replace

import numpy as np
import paddle
import pytest

from ppfleetx.generation.decode_loop import Rules, decode
from ppfleetx.generation.decoding_session import DecodingSession, NextTokenModel
from ppfleetx.generation.gumbel_sampling import RandomStream
from ppfleetx.generation.kv_cache import GrowingCache
from ppfleetx.generation.logits_processors import penalize_repetition
from ppfleetx.generation.sampling_params import SamplingParams

PROMPTS = [[5, 3, 9], [1], [7, 7, 2, 50, 4, 3, 8], [60, 0]]
NEW = 24
SAMPLINGS = {
    "all": {"temperature": 1.3},
    "top_k": {"top_k": 12, "temperature": 0.8},
    "top_p": {"top_p": 0.9, "temperature": 1.5},
    "top_k_top_p": {"top_k": 20, "top_p": 0.8, "temperature": 2.0},
}


def run(
    model,
    prompts: list,
    rules: Rules,
    strategy: str = "greedy",
    *,
    first: int = 0,
    use_cache: bool = True,
    copies: int = 1,
):
    """Tokens and reasons for the end. ``first`` is the number of the first prompt in the random streams."""
    session = DecodingSession(NextTokenModel(model, 61), prompts, use_cache=use_cache)
    streams = []
    if strategy != "greedy":
        rules = replace(rules, options=replace(rules.options, **SAMPLINGS[strategy]))
        numbers = range(first, first + len(prompts))
        streams = [RandomStream(11, number, copy, 61) for number in numbers for copy in range(copies)]
    with paddle.no_grad():
        rows = decode(session, rules, [NEW] * len(prompts), streams=streams, copies=copies)
    return [(row.ids, row.finish_reason) for row in rows]


@pytest.mark.slow_after(8)
@pytest.mark.parametrize(
    "rules",
    [Rules(), Rules((9,), 4, SamplingParams(repetition_penalty=1.3))],
    ids=["plain", "end_min_penalty"],
)
@pytest.mark.parametrize("strategy", ["greedy", *SAMPLINGS])
def test_cache_gives_the_tokens_of_the_full_forward(model, strategy: str, rules: Rules) -> None:
    copies = 1 if strategy == "greedy" else 3
    results = [run(model, PROMPTS, rules, strategy, use_cache=use, copies=copies) for use in (True, False)]
    assert results[0] == results[1]
    assert len({tuple(ids) for ids, _ in results[0]}) > 1


@pytest.mark.parametrize("strategy", ["greedy", "top_k_top_p"])
def test_a_row_in_a_batch_equals_the_row_alone(model, strategy: str) -> None:
    rules = Rules((9,), 2, SamplingParams(repetition_penalty=1.2))
    together = run(model, PROMPTS, rules, strategy)
    for number, prompt in enumerate(PROMPTS):
        assert run(model, [prompt], rules, strategy, first=number) == [together[number]]


def test_cached_logits_equal_those_of_the_full_forward(model) -> None:
    cached = DecodingSession(NextTokenModel(model, 61), PROMPTS, use_cache=True)
    plain = DecodingSession(NextTokenModel(model, 61), PROMPTS, use_cache=False)
    with paddle.no_grad():
        for step in range(8):
            ours, full = cached.next_logits().numpy(), plain.next_logits().numpy()
            np.testing.assert_allclose(ours, full, rtol=1e-4, atol=1e-4)
            tokens = (full.argmax(-1) + step) % 61
            cached.append(tokens)
            plain.append(tokens)
            if step == 3:
                for session in (cached, plain):
                    session.select(np.array([2, 0, 0, 3, 1]))


def test_a_row_ends_with_the_end_token_and_the_others_go_on(model) -> None:
    free = run(model, PROMPTS, Rules())
    end = free[0][0][5]
    ended = run(model, PROMPTS, Rules(end_ids=(end,)))
    for (ids, reason), (free_ids, _) in zip(ended, free, strict=True):
        expected = free_ids[: free_ids.index(end) + 1] if end in free_ids else free_ids
        assert ids == expected
        assert reason == ("stop" if end in free_ids else "length")
    assert {reason for _, reason in ended} >= {"stop"}


@pytest.mark.parametrize("strategy", ["greedy", "all"])
def test_the_end_token_does_not_come_before_the_minimum(model, strategy: str) -> None:
    """Whatever the end token is, it is forbidden for exactly ``min_new_tokens`` steps."""
    likeliest = run(model, PROMPTS[:1], Rules(), strategy)[0][0][0]
    assert len(run(model, PROMPTS[:1], Rules(end_ids=(likeliest,)), strategy)[0][0]) == 1
    ids, _ = run(model, PROMPTS[:1], Rules(end_ids=(likeliest,), min_new_tokens=6), strategy)[0]
    assert likeliest not in ids[:6]
    assert len(ids) > 6


def test_the_end_token_may_come_right_after_the_minimum(make_model) -> None:
    """A flat model, 61 tokens, 400 rows: some of them draw the end token at the first occasion."""
    model, _ = make_model(initializer_range=1e-6)
    rows = run(model, [[3]], Rules(end_ids=(9,), min_new_tokens=5), "all", copies=400)
    assert min(ids.index(9) for ids, reason in rows if reason == "stop") == 5


def test_rows_have_limits_of_their_own(model) -> None:
    session = DecodingSession(NextTokenModel(model, 61), PROMPTS, use_cache=True)
    with paddle.no_grad():
        rows = decode(session, Rules(), [3, 1, 9, 2])
    assert [len(row.ids) for row in rows] == [3, 1, 9, 2]
    whole = run(model, PROMPTS, Rules())
    assert [row.ids for row in rows] == [
        ids[: len(row.ids)] for row, (ids, _) in zip(rows, whole, strict=True)
    ]


def test_padding_ids_are_never_produced(make_model) -> None:
    """With uniform logits every id of the table would come up: 61 of 640 columns are true ones."""
    for tied in (True, False):
        model, cfg = make_model(
            vocab_size_divisible_unit=640, initializer_range=1e-6, tie_word_embeddings=tied
        )
        assert cfg.padded_vocab_size == 640
        rows = run(model, PROMPTS, Rules(), "all", copies=20)
        seen = {token for ids, _ in rows for token in ids}
        assert seen == set(range(61))


def test_penalty_counts_the_whole_history_once() -> None:
    logits = paddle.to_tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    history = paddle.to_tensor(np.array([[0, 1, 1, 0], [3, 3, 3, 3]]))
    result = penalize_repetition(logits, history, 2.0).numpy()
    np.testing.assert_array_equal(result, [[1.0, -4.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.25]])


def test_a_column_is_written_over_after_the_first_pass() -> None:
    """The first keys come as the model leaves them, which may be a view with its axes exchanged."""
    cache = GrowingCache()
    first = paddle.randn([5, 2, 3, 4]).transpose([1, 2, 0, 3])
    before = first.numpy()
    cache.extend(5, np.ones((2, 5), dtype=bool))
    cache.update(0, first, first + 1)
    cache.shorten(3)
    new = paddle.randn([2, 3, 1, 4])
    cache.extend(1, np.ones((2, 4), dtype=bool))
    keys, values, penalty = cache.update(0, new, new + 1)
    expected = np.concatenate([before[:, :, :3], new.numpy()], axis=2)
    np.testing.assert_array_equal(keys.numpy()[:, :, :4], expected)
    np.testing.assert_array_equal(values.numpy()[:, :, :4], expected + 1)
    assert (penalty.numpy()[..., :4] == 0).all()
    assert (penalty.numpy()[..., 4:] < -1e8).all()
