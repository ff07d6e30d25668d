# ruff: noqa: E501 requests are long
"""Chat completions, log probabilities and other OpenAI features, through the ``openai`` client."""

import numpy as np
import openai
import paddle
import pytest

from ppfleetx.config.sections.root import GenerationConfig
from ppfleetx.data.chat.templates import find_template
from ppfleetx.generation.generator import Generator
from tests.deploy.server.conftest import Server, error_of

SYSTEM = {"role": "system", "content": "Digits 31415926535897932384626433832795"}
CHATS = [
    [SYSTEM, {"role": "user", "content": "the cat"}],
    [SYSTEM, {"role": "user", "content": "hat?"}, {"role": "assistant", "content": "the"}, {"role": "user", "content": "x\u00e9"}],
    [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "other"}]}],
]  # fmt: skip


def prompt_ids(offline: Generator, messages: list[dict]) -> list[int]:
    flat = [
        {**one, "content": "\n".join(part["text"] for part in one["content"])}
        if isinstance(one["content"], list)
        else one
        for one in messages
    ]
    return find_template(offline.tokenizer).encode(offline.tokenizer, flat, add_generation_prompt=True)


def logprobs_by_hand(offline: Generator, ids: list[int]) -> np.ndarray:
    """``[n, V]`` float64 after each token, from the plain forward pass."""
    model = offline.next_token_model.model
    model.eval()
    with paddle.no_grad():
        logits = model(paddle.to_tensor([ids]), paddle.arange(len(ids)).unsqueeze(0), None)[:, 0]
    values = logits.numpy()[:, : offline.tokenizer.vocab_size].astype(np.float64)
    values -= values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def test_chats_are_those_of_the_offline_generator(server: Server, offline: Generator) -> None:
    """Thirty at once, greedy and sampled, most of which begin with the same message."""
    section = GenerationConfig(max_dec_len=14, temperature=0.8, top_p=0.9, seed=5)
    greedy = GenerationConfig(max_dec_len=14, decode_strategy="greedy_search")
    sampled_texts, greedy_texts = [], []
    for chat in CHATS:
        prompt = prompt_ids(offline, chat)
        sampled_texts.append(offline.generate([prompt], section)[0][0].text)
        greedy_texts.append(offline.generate([prompt], greedy)[0][0].text)
    sampled = [
        {"messages": one, "max_tokens": 14, "temperature": 0.8, "top_p": 0.9, "seed": 5} for one in CHATS
    ]
    likeliest = [{"messages": one, "max_completion_tokens": 14, "temperature": 0} for one in CHATS]
    before = server.metric("ppfleetx_reused_prompt_tokens_total")
    answers = server.together((sampled + likeliest) * 5)
    assert [one.choices[0].message.content for one in answers] == (sampled_texts + greedy_texts) * 5
    assert {one.choices[0].message.role for one in answers} == {"assistant"}
    assert answers[0].usage.prompt_tokens == len(prompt_ids(offline, CHATS[0]))
    # The second message of the chats, and all of those that come again.
    assert server.metric("ppfleetx_reused_prompt_tokens_total") - before > 20 * 30
    assert 0 < server.metric("ppfleetx_prefix_cache_tokens") <= 4096


def test_a_streamed_chat_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    body = {"model": "gpt", "messages": CHATS[0], "seed": 3, "max_tokens": 20, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**body)
    texts, tokens, reasons, roles, usage = ["", ""], [[], []], [None, None], [None, None], None
    for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        assert "usage" in chunk.model_fields_set, "null in all but the last"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles[choice.index] = choice.delta.role or roles[choice.index]
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    for streamed, choice in zip(tokens, whole.choices, strict=True):
        expected = choice.logprobs.content
        assert [one.token for one in streamed] == [one.token for one in expected]
        # The second request reuses the first one's prompt, in products of other sizes, which round otherwise.
        logprobs = [one.logprob for one in expected]
        assert [one.logprob for one in streamed] == pytest.approx(logprobs, abs=1e-4)
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles == ["assistant"] * 2
    assert usage == whole.usage


def test_logprobs_of_a_chat_are_those_by_hand(client: openai.OpenAI, offline: Generator) -> None:
    answer = client.chat.completions.create(
        model="gpt", messages=CHATS[0], seed=4, max_tokens=12, temperature=0.9, logprobs=True, top_logprobs=4
    )
    prompt, content = prompt_ids(offline, CHATS[0]), answer.choices[0].logprobs.content
    section = GenerationConfig(max_dec_len=12, temperature=0.9, seed=4)
    new = [
        one for one in offline.generate([prompt], section)[0][0].ids if one not in offline.tokenizer.end_ids
    ]
    assert len(content) == len(new) > 3
    by_hand = logprobs_by_hand(offline, [*prompt, *new])[len(prompt) - 1 :]
    for token, row, entry in zip(new, by_hand, content, strict=False):
        assert bytes(entry.bytes) == offline.tokenizer.token_bytes(token)
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        likeliest = np.argsort(-row)[:4]
        assert [bytes(one.bytes) for one in entry.top_logprobs] == [
            offline.tokenizer.token_bytes(int(one)) for one in likeliest
        ]
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(row[likeliest].tolist(), abs=1e-4)
    assert b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace") == (
        answer.choices[0].message.content
    )


def test_logprobs_of_completions_and_of_their_prompts(client: openai.OpenAI, offline: Generator) -> None:
    prompt = "the cat and x\u00e9"
    ids = offline.tokenizer.encode(prompt)
    by_hand = logprobs_by_hand(offline, ids)
    only = client.completions.create(model="gpt", prompt=[prompt, "and"], echo=True, max_tokens=0, logprobs=2)
    assert [one.text for one in only.choices] == [prompt, "and"]
    assert only.usage.completion_tokens == 0
    assert only.choices[0].finish_reason == "length"
    found = only.choices[0].logprobs
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    expected = [by_hand[place, token] for place, token in enumerate(ids[1:])]
    assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert all(2 <= len(top) <= 3 for top in found.top_logprobs[1:])
    assert [prompt[offset] for offset in found.text_offset[:1]] == ["t"]
    whole = client.completions.create(
        model="gpt", prompt=prompt, echo=True, max_tokens=9, temperature=0, logprobs=1
    )
    longer = whole.choices[0].logprobs
    assert longer.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    assert longer.tokens[: len(ids)] == found.tokens
    for token, logprob, top in zip(
        longer.tokens[len(ids) :],
        longer.token_logprobs[len(ids) :],
        longer.top_logprobs[len(ids) :],
        strict=True,
    ):
        assert top == {token: logprob}, "the likeliest was taken"
    parts = client.completions.create(
        model="gpt", prompt=prompt, echo=True, max_tokens=9, temperature=0, logprobs=1, stream=True
    )
    pieces = [chunk.choices[0] for chunk in parts]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for piece in pieces for one in getattr(piece.logprobs, name)] == getattr(longer, name), (
            name
        )
    nothing = client.completions.create(model="gpt", prompt=prompt, max_tokens=0)
    assert nothing.choices[0].text == ""


def test_the_best_of_several_has_the_likeliest_tokens(client: openai.OpenAI) -> None:
    body = {"model": "gpt", "prompt": ["the cat", "and"], "seed": 8, "max_tokens": 10, "logprobs": 0}
    all_of_them = client.completions.create(**body, n=4).choices
    best = client.completions.create(**body, n=2, best_of=4)
    for prompt in (0, 1):
        own = all_of_them[prompt * 4 : prompt * 4 + 4]
        means = sorted(own, key=lambda one: np.mean(one.logprobs.token_logprobs), reverse=True)
        assert [one.text for one in best.choices[prompt * 2 : prompt * 2 + 2]] == [
            one.text for one in means[:2]
        ]
    assert [one.index for one in best.choices] == [0, 1, 2, 3]
    assert best.usage.completion_tokens > 2 * 2 * 10, "all that were made are counted"


def test_penalties_lower_repetition(client: openai.OpenAI) -> None:
    body = {"model": "gpt", "messages": CHATS[0], "temperature": 0, "max_tokens": 30, "logprobs": True}

    def repeated(**options: float) -> int:
        content = client.chat.completions.create(**body, **options).choices[0].logprobs.content
        return len(content) - len({bytes(one.bytes) for one in content})

    assert repeated(frequency_penalty=2.0, presence_penalty=2.0) < repeated()


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"content": "x"}]}, "messages", "message 0 must be an object with role and content"),
        ({"messages": [{"role": "user"}]}, "messages", "must have a text as its content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "of parts that are not"),
        ({"tools": [{"type": "function"}]}, "tools", "must be a list of"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools", "of f must be a JSON schema"),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_object"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "has another value"),
        ({"max_tokens": 9000}, "max_tokens", "leaves room for"),
        ({"messages": [{"role": "user", "content": "x" * 500_000}]}, "messages", "tokens are too many"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot be set by a request"),
        ({"prompt": "x"}, "prompt", "unknown parameter 'prompt'"),
    ],
)  # fmt: skip
def test_a_wrong_chat_is_refused(server: Server, body: dict, param: str, message: str) -> None:
    error = error_of(server.http.post("/v1/chat/completions", json={"messages": CHATS[0], **body}), 400)
    assert error["param"] == param
    assert message in error["message"]


def test_what_changes_nothing_may_be_sent_with_a_chat(server: Server) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "parallel_tool_calls": True,
        "metadata": {"trace": "7"},
        "service_tier": "auto",
        "reasoning_effort": "low",
        "logprobs": False,
        "logit_bias": {},
        "top_logprobs": None,
        "user": "somebody",
        "modalities": ["text"],
        "n": 1,
        "prediction": None,
        "top_k": -1,
        "stop": ["[never]"] * 6,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "use_beam_search": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template_kwargs": {"self": 1},
        "prompt_logprobs": None,
    }
    plain, sent = (
        server.http.post(
            "/v1/chat/completions", json={"messages": CHATS[0], "seed": 1, "max_tokens": 9, **more}
        )
        for more in ({}, neutral)
    )
    assert sent.json()["choices"] == plain.json()["choices"]
