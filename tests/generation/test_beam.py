"""Beam search beyond what Hugging Face 5 still has: groups; and what holds for every kind of it."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ppfleetx.generation.beam import BeamOptions, beam_search
from ppfleetx.generation.decode_loop import Rules, decode
from ppfleetx.generation.decoding_session import DecodingSession, NextTokenModel
from ppfleetx.generation.sampling_params import SamplingParams

PROMPTS = [[5, 3, 9], [1], [7, 7, 2, 50, 4, 3, 8], [60, 0]]
NEW = 16
KINDS = {
    "plain": BeamOptions(4),
    "two_groups": BeamOptions(4, num_groups=2, diversity_rate=0.7),
    "each_its_own": BeamOptions(3, 1.0, num_groups=3, diversity_rate=2.5),
    "early": BeamOptions(4, 0.6, True, 2, 0.3),
    "never": BeamOptions(6, 1.0, "never", 3, 1.1),
}
RULES = Rules((9,), 3, SamplingParams(repetition_penalty=1.3))


def search(model, prompts, rules, options, *, use_cache=True, num_results=1, new=NEW):
    session = DecodingSession(NextTokenModel(model, 61), prompts, use_cache=use_cache)
    with paddle.no_grad():
        rows = beam_search(session, rules, [new] * len(prompts), options, num_results)
    ids = [row.ids for row in rows]
    return [ids[i : i + num_results] for i in range(0, len(ids), num_results)]


def diverse_beam_search(model, prompt: list[int], options: BeamOptions) -> list[list[int]]:
    """Hugging Face 4's group beam search of one prompt, written from its documented behaviour.

    One beam after the other through the whole model, in float64. Rules as in RULES. Its scorer looked at
    the best candidate where version 5 looks at the best beam; that is ours here, too.
    """
    size = options.num_beams // options.num_groups
    groups = [
        {"beams": [(0.0, [])] + [(-1e9, [])] * (size - 1), "results": [], "open": True}
        for _ in range(options.num_groups)
    ]
    for length in range(1, NEW + 1):
        taken = np.zeros(61)
        for group in groups:
            if not group["open"]:
                continue
            candidates = []
            for number, (score, ids) in enumerate(group["beams"]):
                log_probs = next_log_probs(model, prompt + ids) - options.diversity_rate * taken
                for token in set(prompt + ids):
                    log_probs[token] *= 1.3 if log_probs[token] < 0 else 1 / 1.3
                if length <= 3:
                    log_probs[9] = -np.inf
                candidates += [(score + log_probs[token], number, token) for token in range(61)]
            candidates = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * size]
            beams = []
            for rank, (score, number, token) in enumerate(candidates):
                ids = group["beams"][number][1] + [token]
                if (token == 9 or length == NEW) and rank < size:
                    group["results"].append((score / length**options.length_penalty, ids))
                if token != 9 and len(beams) < size:
                    beams.append((score, ids))
            group["beams"] = beams
            group["results"] = sorted(group["results"], key=lambda result: -result[0])[:size]
            for _, ids in beams:
                taken[ids[-1]] += 1
            full = len(group["results"]) == size
            if full and beams:
                longest = NEW if options.early_stopping == "never" else length
                attainable = beams[0][0] / longest**options.length_penalty
                group["open"] = options.early_stopping is not True and attainable > group["results"][-1][0]
    everything = [result for group in groups for result in group["results"]]
    return [ids for _, ids in sorted(everything, key=lambda result: -result[0])]


def next_log_probs(model, ids: list[int]) -> np.ndarray:
    with paddle.no_grad():
        logits = model(paddle.to_tensor([ids]))[-1, 0, :61].numpy().astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_groups_are_those_of_an_independent_search(make_model, kind: str) -> None:
    model, _ = make_model()
    options, prompts = KINDS[kind], PROMPTS[:3:2]
    found = search(model, prompts, RULES, options, num_results=options.num_beams)
    for prompt, results in zip(prompts, found, strict=True):
        assert results == diverse_beam_search(model, prompt, options)
    assert len({tuple(ids) for results in found for ids in results}) > len(prompts)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    "rules", [RULES, Rules((9,), 0, forced_bos_id=17, forced_eos_id=23)], ids=["rules", "forced"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_cache_gives_the_tokens_of_the_full_forward(model, kind: str, rules: Rules) -> None:
    results = [search(model, PROMPTS, rules, KINDS[kind], use_cache=use, num_results=2) for use in (1, 0)]
    assert results[0] == results[1]


class Table:
    """A model whose next token has the same probabilities whatever came before."""

    def __init__(self, *probabilities: float) -> None:
        self._logits = np.log(np.array(probabilities, dtype=np.float32))

    def without_cache(self, tokens, position_ids, document_start):
        return paddle.to_tensor(np.tile(self._logits, (tokens.shape[0], 1)))


def test_diversity_by_hand() -> None:
    """Probabilities .5 .3 .15 .05, rate .6, three groups of one beam.

    The first group takes token 0. To the second one it is worth log .5 - .6 = -1.29, less than token 1
    with log .3 = -1.20. To the third one both cost .6 more: token 0 again. So it goes on in every step.
    """
    session = DecodingSession(Table(0.5, 0.3, 0.15, 0.05), [[3], [2, 2]], use_cache=False)
    options = BeamOptions(3, num_groups=3, diversity_rate=0.6)
    rows = beam_search(session, Rules(), [2, 3], options, 3)
    assert [row.ids for row in rows] == [[0, 0], [1, 1], [0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]


def test_a_first_token_that_is_forced_might_have_been_in_the_prompt(model) -> None:
    for options in (None, KINDS["plain"]):
        forced, asked = Rules(forced_bos_id=17), Rules()
        after = [[*prompt, 17] for prompt in PROMPTS]
        if options is None:
            one, other = greedy_ids(model, PROMPTS, forced, NEW), greedy_ids(model, after, asked, NEW - 1)
        else:
            one = [ids for [ids] in search(model, PROMPTS, forced, options)]
            other = [ids for [ids] in search(model, after, asked, options, new=NEW - 1)]
        assert one == [[17, *ids] for ids in other]


def test_the_last_place_is_each_rows_own(model) -> None:
    free = greedy_ids(model, PROMPTS, Rules(), NEW)
    session = DecodingSession(NextTokenModel(model, 61), PROMPTS, use_cache=True)
    with paddle.no_grad():
        rows = decode(session, Rules((9,), forced_eos_id=9), [4, 1, 7, 16])
    for row, ids in zip(rows, free, strict=True):
        cut = [*ids[: row.max_new_tokens - 1], 9]
        assert row.ids == cut[: cut.index(9) + 1]
        assert row.finish_reason == "stop"


def greedy_ids(model, prompts, rules: Rules, new: int) -> list[list[int]]:
    session = DecodingSession(NextTokenModel(model, 61), prompts, use_cache=True)
    with paddle.no_grad():
        return [row.ids for row in decode(session, rules, [new] * len(prompts))]
