"""Keys of ``TokenOptions`` and scores in the whole of a generation."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.generation import GenerationConfig, StructuredOutputs
from ppfleetx.config.validate import section_of
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.export_dir import check_generation
from ppfleetx.generation.generator import Generator
from ppfleetx.generation.sampling import score_prompt
from ppfleetx.generation.sampling_params import Grammar, RowTokens, SamplingParams, process_logits
from ppfleetx.generation.text_io import RowText

TOKENIZER_GOLDENS = Path(__file__).parents[1] / "goldens/tokenizers"
TOKENIZERS = sorted(one.name for one in TOKENIZER_GOLDENS.iterdir())
PROMPTS = ["the cat", "hat the other", "an"]
GREEDY = {"decode_strategy": "greedy_search", "max_dec_len": 24}
SCHEMA = {
    "type": "object",
    "properties": {"sort": {"enum": ["cat", "hat"]}, "old": {"type": "boolean"}},
    "required": ["sort", "old"],
    "additionalProperties": False,
}

STRATEGIES = {
    "guessed": {"decode_strategy": "greedy_search"},
    "greedy": {"decode_strategy": "greedy_search", "prompt_lookup_num_tokens": 0},
    "sampled": {"temperature": 1.5, "seed": 3},
    "beams": {"decode_strategy": "beam_search", "num_beams": 3},
}


@pytest.fixture
def generator(make_model, tokenizer) -> Generator:
    staged, cfg = make_model(vocab_size=300, max_position_embeddings=256)
    return Generator(staged, cfg, tokenizer)


def ids_of(generator: Generator, **keys: object) -> list[tuple[int, ...]]:
    return [one.ids for each in generator.generate(PROMPTS, GenerationConfig(**keys)) for one in each]


@pytest.mark.parametrize("keys", [{"temperature": 0, "top_p": 0.5}, {"min_p": 1, "seed": 3}], ids=str)
def test_options_that_leave_only_the_likeliest_token(generator: Generator, keys: dict) -> None:
    assert ids_of(generator, max_dec_len=24, **keys) == ids_of(generator, **GREEDY)


def test_what_ends_a_continuation(generator: Generator, tokenizer) -> None:
    free = ids_of(generator, **GREEDY, ignore_eos=True)
    assert [len(ids) for ids in free] == [24] * 3
    ended = ids_of(generator, **GREEDY, ignore_eos=True, stop_token_ids=(free[0][5],))
    assert ended[0] == free[0][: free[0].index(free[0][5]) + 1]
    assert ids_of(generator, **GREEDY, ignore_eos=True) == ids_of(generator, **GREEDY, eos_token_id=())
    options = GenerationConfig(**GREEDY, ignore_eos=True, stop_token_ids=(free[0][5],))
    [[one]] = generator.generate(PROMPTS[:1], options)
    assert one.text == tokenizer.decode(one.ids[:-1]), "as in vLLM, what ends a text is not in it"


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_reason_for_a_stop(generator: Generator, tokenizer, name: str) -> None:
    """As in vLLM: a token of ``stop_token_ids``, but not one of the model's own."""
    options = STRATEGIES[name] | {"max_dec_len": 24}
    free = ids_of(generator, **options, ignore_eos=True)[0]
    named = {"stop_token_ids": (free[5],)}
    for more, reason in (
        ({"ignore_eos": True}, None),
        ({"ignore_eos": True, **named}, free[5]),
        ({"eos_token_id": free[5]}, None),
        ({"eos_token_id": free[5], **named}, None),
    ):
        [[one]] = generator.generate(PROMPTS[:1], GenerationConfig(**options, **more))
        assert one.stop_reason == reason
        assert one.finish_reason == ("stop" if len(more) > 1 or "eos_token_id" in more else "length")


@pytest.mark.parametrize("name", ["guessed", "greedy", "sampled"])
def test_what_ends_a_text_can_be_in_it(generator: Generator, tokenizer, name: str) -> None:
    options = STRATEGIES[name] | {"max_dec_len": 24, "ignore_eos": True}
    [[free]] = generator.generate(PROMPTS[:1], GenerationConfig(**options))
    stop, token = free.text[4:7], free.ids[5]
    before = free.text[: free.text.index(stop)]
    ids = free.ids[: free.ids.index(token) + 1]
    for more, texts, reason in (
        ({"stop": ("never", stop)}, (before, before + stop), stop),
        ({"stop_token_ids": (token,)}, (tokenizer.decode(ids[:-1]), tokenizer.decode(ids)), token),
    ):
        for included, text in zip((False, True), texts, strict=True):
            pieces: list[str] = []
            cfg = GenerationConfig(**options, **more, include_stop_str_in_output=included)
            [[one]] = generator.generate(
                PROMPTS[:1], cfg, on_text=lambda _prompt, _copy, piece, to=pieces: to.append(piece)
            )
            assert (one.text, one.finish_reason, one.stop_reason) == (text, "stop", reason)
            assert "".join(pieces) == text


def test_no_stop_string_ends_within_the_minimum(generator: Generator) -> None:
    [[free]] = generator.generate(PROMPTS[:1], GenerationConfig(**GREEDY, ignore_eos=True))
    for least in range(13):
        cfg = GenerationConfig(**GREEDY, ignore_eos=True, min_dec_len=least, stop=tuple(free.text))
        [[one]] = generator.generate(PROMPTS[:1], cfg)
        assert least < len(one.ids) < 24
        assert one.ids == free.ids[: len(one.ids)]
        assert free.text.startswith(one.text)


def test_a_special_token_as_a_stop_string(generator: Generator, tokenizer) -> None:
    """It is not in the text, and yet it is found. Before the minimum it is forbidden."""
    special = tokenizer.decode([tokenizer.eod_id])
    options = {"logit_bias": {tokenizer.eod_id: 1000.0}, "ignore_eos": True, "stop": ("never", special)}
    [[one]] = generator.generate(PROMPTS[:1], GenerationConfig(**GREEDY, **options))
    assert (one.text, len(one.ids), one.finish_reason, one.stop_reason) == ("", 1, "stop", special)
    [[one]] = generator.generate(PROMPTS[:1], GenerationConfig(**GREEDY, **options, min_dec_len=4))
    assert (len(one.ids), one.stop_reason) == (5, special)


def test_bad_words_do_not_occur(generator: Generator, tokenizer) -> None:
    free = ids_of(generator, **GREEDY, ignore_eos=True)
    word = tokenizer.decode(free[0][3:5])
    pair = free[1][2:4]
    options = {"bad_words": (word, pair), "suppress_tokens": (free[2][0],)}
    found = ids_of(generator, **GREEDY, ignore_eos=True, **options)
    inside = tuple(tokenizer.encode(word.lstrip()))
    for ids in found:
        assert free[2][0] not in ids
        for banned in (pair, inside):
            assert banned not in [ids[i : i + len(banned)] for i in range(len(ids))]


@pytest.mark.timeout(60)
def test_all_but_one_token_may_be_suppressed() -> None:
    """Of a large vocabulary, which costs no more than one pass over it."""
    vocab_size = 200_000
    options = SamplingParams(suppress_tokens=tuple(range(1, vocab_size)))
    logits = process_logits(paddle.zeros([1, vocab_size]), options, [RowTokens([], 0)])
    assert paddle.isfinite(logits).nonzero().tolist() == [[0, 0]]


def test_logprobs_are_the_models_own(generator: Generator, tokenizer) -> None:
    """Whatever options choose the tokens."""
    options = {"temperature": 0.7, "min_p": 0.02, "logit_bias": {32: 3.0}, "seed": 2, "max_dec_len": 12}
    plain = generator.generate(PROMPTS, GenerationConfig(**options))
    scored = generator.generate(PROMPTS, GenerationConfig(**options, logprobs=3))
    for prompt, [one], [same] in zip(PROMPTS, scored, plain, strict=True):
        assert (one.ids, one.text) == (same.ids, same.text)
        assert same.logprobs is None
        ids = tokenizer.encode_prompt(prompt)
        with paddle.no_grad():
            expected = score_prompt(generator.next_token_model, [*ids, *one.ids], 3)[len(ids) :]
        assert [score.token for score in one.logprobs] == list(one.ids)
        for mine, theirs in zip(one.logprobs, expected, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def test_score_of_beam_search(generator: Generator) -> None:
    """transformers' `sequences_scores`: the log-probability by the length to the power of the penalty."""
    options = {"decode_strategy": "beam_search", "num_beams": 3, "num_return_sequences": 3, "max_dec_len": 6}
    for each in generator.generate(PROMPTS, GenerationConfig(**options, length_penalty=1.0)):
        assert [one.score for one in each] == sorted((one.score for one in each), reverse=True)
        assert all(-50 < one.score < 0 for one in each)


class TestStructuredOutputs:
    pytestmark = pytest.mark.skipif(
        importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed"
    )

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_every_strategy_keeps_to_a_schema(self, generator: Generator, strategy: str) -> None:
        copies = 2 if strategy in ("sampled", "beams") else 1
        options = {**STRATEGIES[strategy], "max_dec_len": 160, "num_return_sequences": copies}
        cfg = GenerationConfig(structured_outputs={"json_schema": SCHEMA}, **options)
        for each in generator.generate(PROMPTS, cfg):
            for one in each:
                assert one.finish_reason == "stop"
                found = json.loads(one.text)
                assert (found["sort"] in ("cat", "hat"), type(found["old"])) == (True, bool)

    @pytest.mark.parametrize(
        ("form", "pattern"),
        [
            ({"regex": r"[a-f]{4}-\d\d"}, r"[a-f]{4}-\d\d"),
            ({"choice": ("yes", "no, thanks")}, "yes|no, thanks"),
            ({"grammar": 'start: "a" ("b" | "c")'}, "ab|ac"),
            ({"grammar": 'root ::= "x" [0-9] "y"'}, r"x\dy"),
        ],
        ids=["regex", "choice", "lark", "gbnf"],
    )
    def test_forms(self, generator: Generator, form: dict, pattern: str) -> None:
        cfg = GenerationConfig(max_dec_len=40, seed=1, structured_outputs=form)
        for [one] in generator.generate(PROMPTS, cfg):
            assert re.fullmatch(pattern, one.text), one.text
            assert one.finish_reason == "stop"

    @pytest.mark.parametrize("name", TOKENIZERS)
    @pytest.mark.parametrize("form", [{"choice": ("yes, it is", "no")}, {"json_schema": SCHEMA}], ids=str)
    def test_every_kind_of_tokenizer(self, name: str, form: dict) -> None:
        """Also those that write a space before a text."""
        tokenizer = Tokenizer.load(TOKENIZER_GOLDENS / name)
        prompt, rng = tokenizer.encode_prompt("Is it?"), np.random.default_rng(0)
        grammar = Grammar(StructuredOutputs(**form), tokenizer, (tokenizer.eod_id,))
        for _ in range(5):
            text, new = RowText(tokenizer, (), prompt), [-1]
            while new[-1] != tokenizer.eod_id:
                allowed = np.flatnonzero(grammar.allowed(tuple(new[1:])))
                new.append(int(rng.choice(allowed)))
                text.feed(new[-1])
            written = text.finish()
            if "choice" in form:
                assert written in form["choice"]
            else:
                assert json.loads(written).keys() == {"sort", "old"}

    @pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
    @pytest.mark.parametrize(
        "ban",
        [
            {"min_dec_len": 12},
            {"bad_words": ("y", "the")},
            {"suppress_tokens": (*b"yes", 270)},
            {"no_repeat_ngram_size": 1},
            {"logit_bias": dict.fromkeys(b"yes", -1e300)},
        ],
        ids=lambda ban: next(iter(ban)),
    )
    def test_a_form_wins_over_what_forbids_its_last_tokens(
        self, generator: Generator, ban: dict, strategy: dict
    ) -> None:
        form = {"choice": ("yesyes",)}
        cfg = GenerationConfig(max_dec_len=12, structured_outputs=form, **ban, **strategy)
        for [one] in generator.generate(PROMPTS, cfg):
            assert (one.text, one.finish_reason) == ("yesyes", "stop")

    def test_a_ban_holds_in_the_rows_where_the_form_leaves_other_tokens(self, tokenizer) -> None:
        cfg = GenerationConfig(structured_outputs={"regex": "yes|n[ab]*"}, suppress_tokens=(*b"b",))
        options = SamplingParams.of(cfg, tokenizer, tokenizer.end_ids)
        rows = [RowTokens(list(text), len(text)) for text in (b"yes", b"n", b"")]
        logits = process_logits(paddle.zeros([3, tokenizer.vocab_size]), options, rows, tokenizer.end_ids)
        allowed = [set(row.nonzero().flatten().tolist()) for row in paddle.isfinite(logits)]
        assert allowed == [{*tokenizer.end_ids}, {*b"a"}, {*b"yn"}]

    @pytest.mark.parametrize("key", ["forced_bos_token_id", "forced_eos_token_id"])
    def test_no_token_is_forced(self, key: str) -> None:
        with pytest.raises(ConfigError, match="break the form") as error:
            section_of(GenerationConfig, {"structured_outputs": {"regex": "a"}, key: 65})
        assert (error.value.key, error.value.value) == (key, 65)

    @pytest.mark.parametrize(
        ("keys", "rule"),
        [
            ({"structured_outputs": {"regex": "("}}, "unclosed group"),
            ({"structured_outputs": {"grammar": "start: nothing"}}, 'unknown name: "nothing"'),
            ({"structured_outputs": {"json_schema": {"type": "shape"}}}, "type: shape"),
            ({"structured_outputs": {"grammar": "start: start"}}, "no text can begin this form$"),
            ({"structured_outputs": {"json_schema": {"allOf": [{"$ref": "#"}]}}}, "begin this form$"),
            ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "end token"),
        ],
    )
    def test_a_wrong_form_is_refused(self, generator: Generator, keys: dict, rule: str) -> None:
        with pytest.raises(ConfigError, match=rule) as error:
            generator.generate(PROMPTS, GenerationConfig(**keys))
        assert error.value.key.startswith("Generation.structured_outputs")


@pytest.mark.parametrize(
    "keys",
    [
        {"suppress_tokens": (300,)},
        {"bad_words": ((5, 300),)},
        {"logit_bias": {300: 1.0}},
        {"stop_token_ids": (300,)},
        {"eos_token_id": 300},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_an_id_that_the_tokenizer_has_not(generator: Generator, keys: dict) -> None:
    with pytest.raises(ConfigError) as error:
        generator.generate(PROMPTS, GenerationConfig(**keys))
    assert (error.value.key, error.value.value) == (f"Generation.{next(iter(keys))}", 300)


def test_a_text_in_place_of_a_token_id() -> None:
    with pytest.raises(ConfigError, match="each key must be an integer of at least 0") as error:
        section_of(GenerationConfig, {"logit_bias": {" hello": 1.0}})
    assert (error.value.key, error.value.value) == ("logit_bias", " hello")


def test_without_the_library(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ppfleetx\[structured\]"):
        generator.generate(PROMPTS, GenerationConfig(structured_outputs={"regex": "a"}))


@pytest.mark.parametrize(
    "keys",
    [{"min_p": 0.1}, {"no_repeat_ngram_size": 2}, {"logprobs": 0}, {"bad_words": ("x",)}],
    ids=lambda keys: next(iter(keys)),
)
def test_an_exported_program_says_what_it_does_not_read(keys: dict) -> None:
    with pytest.raises(ConfigError) as error:
        check_generation(GenerationConfig(**keys))
    assert error.value.key == f"Generation.{next(iter(keys))}"
