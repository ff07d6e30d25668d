"""The server as the ``openai`` client sees it."""

import json

import httpx
import openai
import pytest

from ppfleetx.config.sections.root import GenerationConfig
from ppfleetx.generation.generator import Generator
from tests.deploy.server.conftest import ENDLESS, Server, error_of

PROMPTS = ["the cat", "and", "the other hat and the other cat and", "x\nyé", "hat the hat " * 5]


def test_greedy_answers_are_the_offline_ones(server: Server, offline: Generator) -> None:
    """In one request, and in many that share a batch."""
    section = GenerationConfig(decode_strategy="greedy_search", max_dec_len=24)
    expected = [one.text for [one] in offline.generate(PROMPTS, section)]
    [answer] = server.together([{"prompt": PROMPTS, "temperature": 0, "max_tokens": 24}])
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(PROMPTS)))
    bodies = [{"prompt": prompt, "temperature": 0, "max_tokens": 24} for prompt in PROMPTS * 2]
    answers = server.together(bodies)
    assert [answer.choices[0].text for answer in answers] == expected * 2


def test_sampled_answers_depend_on_the_seed_alone(server: Server, offline: Generator) -> None:
    """With the offline options they are the offline ones, whatever the neighbors ask for."""
    section = GenerationConfig(
        max_dec_len=30, temperature=0.8, top_k=20, top_p=0.9, num_return_sequences=2, seed=11
    )
    expected = [one.text for ones in offline.generate(PROMPTS[:2], section) for one in ones]
    body = {
        "prompt": PROMPTS[:2],
        "max_tokens": 30,
        "temperature": 0.8,
        "top_p": 0.9,
        "n": 2,
        "seed": 11,
        "extra_body": {"top_k": 20},
    }
    others = [
        {"prompt": "hat", "temperature": 1.5, "max_tokens": 25},
        {"prompt": "the", "temperature": 0, "max_tokens": 12, "extra_body": {"repetition_penalty": 1.5}},
    ]
    first, *_, last = server.together([body, *others, {**body, "seed": 12}])
    assert [choice.text for choice in first.choices] == expected
    assert [choice.text for choice in last.choices] != expected


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    answers = {
        client.completions.create(model="gpt", prompt="the", max_tokens=30).choices[0].text for _ in range(3)
    }
    assert len(answers) == 3


def test_token_ids_echo_and_usage(client: openai.OpenAI, offline: Generator) -> None:
    ids = offline.tokenizer.encode("the cat")
    by_ids = client.completions.create(model="gpt", prompt=[ids, ids[:1]], temperature=0, echo=True)
    by_text = client.completions.create(model="gpt", prompt="the cat", temperature=0)
    assert by_ids.choices[0].text == "the cat" + by_text.choices[0].text
    assert by_text.object == "text_completion"
    assert by_text.model == "gpt"
    assert by_text.usage.prompt_tokens == len(ids)
    assert by_text.usage.completion_tokens == 16
    assert by_ids.usage.prompt_tokens == len(ids) + 1
    assert by_ids.usage.total_tokens == len(ids) + 1 + 32


def test_stop_texts_end_an_answer(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="gpt", prompt="the cat", seed=3, max_tokens=40)
    text = whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    stop = text[20:22]
    cut = client.completions.create(
        model="gpt", prompt="the cat", seed=3, max_tokens=40, stop=[stop, "never to be seen"]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 40


def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    body = {"model": "gpt", "prompt": ["the cat", "and"], "seed": 5, "max_tokens": 20, "echo": True}
    whole = client.completions.create(**body)
    texts, reasons, num_pieces, usage = ["", ""], [None, None], 0, None
    for chunk in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        num_pieces += 1
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "nothing comes after the reason for the end"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert num_pieces > 20


def test_a_stream_ends_with_done(server: Server) -> None:
    answer = server.complete(stream=True, max_tokens=3, temperature=0)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["gpt"]
    assert client.models.retrieve("gpt").owned_by == "ppfleetx"
    with pytest.raises(openai.NotFoundError, match="there is no 'gpt-4'; this server has 'gpt'"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="m" * 100_000, prompt="x")
    assert len(str(caught.value)) < 500, "a message does not say back all that was sent"
    with pytest.raises(openai.NotFoundError, match="there is no POST /v1/moderations"):
        client.moderations.create(model="gpt", input="x")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_token": 5}, "max_token", "unknown parameter 'max_token'; known: "),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens: input should be a valid integer"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 8191}, "max_tokens", "leaves room for 8190 more in the model's 8192 positions"),
        ({"min_tokens": 20}, "min_tokens", "20 is more than max_tokens = 16"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"repetition_penalty": 0.001}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["a"] * 65}, "stop", "may be 64 texts"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
            "unknown parameter 'stream_options.usage'; known: stream_options.include_usage",
        ),
        (
            {"structured_outputs": {"regx": "a"}},
            "structured_outputs.regx",
            "known: structured_outputs.json_schema",
        ),
        ({"prompt": ["a", ""]}, "prompt", "is empty"),
        ({"prompt": [[1], "a", [None]]}, "prompt", "a list of token ids"),
        ({"prompt": [1, 300]}, "prompt", "300 is not a token id"),
        ({"prompt": [-1]}, "prompt", "-1 is not a token id"),
        ({"prompt": {"text": "a"}}, "prompt", "must be a text, a list of texts"),
        ({"prompt": [[10**6]] * 265}, "prompt", "265 prompts x n = 1 are more than the 264"),
        ({"prompt": [5] * 8192}, "prompt", "8192 tokens are too many"),
        ({"prompt": "x" * 500_000}, "prompt", "tokens are too many. The model has 8192"),
        ({"logprobs": 21}, "logprobs", "must be a number from 0 to 20"),
        ({"logprobs": True}, "logprobs", "must be a number from 0 to 20"),
        ({"best_of": 9}, "best_of", "more than the 8 sequences that can run at the same time"),
        ({"best_of": 2, "n": 3}, "best_of", "2 is less than n = 3"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "has ids 0 to"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "each key must be an integer of at least 0, not 'a'"),
        ({"top_k": 2**63}, "top_k", "less than or equal to"),
        ({"bad_words": [""]}, "bad_words", "is in every text"),
        ({"suffix": "end"}, "suffix", "is not supported"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "should be True"),
        ({"use_beam_search": True}, "use_beam_search", "is not supported"),
    ],
)
def test_a_wrong_request_is_refused(server: Server, body: dict, param: str, message: str) -> None:
    error = error_of(server.complete(**body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a", ', "the body is not JSON"),
        (b"", "the body is not JSON"),
        (b"[1, 2]", "should be an object"),
        (b'{"prompt": "\xff"}', "the body is not JSON"),
        (b'{"prompt": "\\ud800"}', "the body is not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "finite number"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"max_tokens": 5}', "prompt: field required"),
        (b'{"prompt": "a", "x": 1, "\\u00e9": 2}', "unknown parameters 'x', '\u00e9'"),
    ],
)
def test_a_malformed_body_is_refused(server: Server, content: bytes, message: str) -> None:
    answer = server.http.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert message in error_of(answer, 400)["message"]


def test_what_changes_nothing_may_be_sent(server: Server) -> None:
    """Clients send the defaults of what is not supported."""
    plain = server.complete(seed=1).json()["choices"]
    neutral = {
        "best_of": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "logprobs": None,
        "suffix": None,
        "stop": None,
        "max_tokens": None,
        "stream_options": None,
    }
    assert server.complete(seed=1, **neutral).json()["choices"] == plain
    options = {"include_usage": False, "include_obfuscation": False}
    assert server.complete(stream=True, stream_options=options).status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_place(server: Server, is_stream: bool) -> None:
    left = server.metric('ppfleetx_requests_total{status="499"}')
    body = {"prompt": ["the cat", "the hat"], "stream": is_stream, **ENDLESS}
    with httpx.Client(base_url=server.url) as client:
        if is_stream:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # kept: letting go of it closes the connection
                assert next(lines).startswith("data: ")
                assert server.metric("ppfleetx_sequences_running") == 2
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=0.3)
    server.wait_for_metric("ppfleetx_sequences_running", 0)
    server.wait_for_metric('ppfleetx_requests_total{status="499"}', left + 1)
    made = server.metric("ppfleetx_generated_tokens_total")
    assert server.complete(max_tokens=1, temperature=0).status_code == 200
    assert server.metric("ppfleetx_generated_tokens_total") == made + 1, "nothing is made for those who left"


def test_health(server: Server) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.head("/health").status_code == 200, "some supervisors ask so"
