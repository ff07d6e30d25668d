"""Forms of answers, tools, embeddings, token ids and other origins, mostly through the ``openai`` client."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import openai
import paddle
import pytest

from ppfleetx.config.sections.root import GenerationConfig
from ppfleetx.deploy.server.tool_calls import AnswerText
from ppfleetx.generation.generator import Generator
from tests.deploy.server.conftest import ORIGIN, Server, error_of

CHAT = [{"role": "user", "content": "the cat"}]
needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed"
)


def tool(name: str, **properties: object) -> dict:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", town={"enum": ["Oslo", "Rome"]}), tool("light", on={"type": "boolean"})]


def test_options_are_those_of_the_offline_generator(server: Server, offline: Generator) -> None:
    options = {
        "min_p": 0.02,
        "typical_p": 0.9,
        "no_repeat_ngram_size": 2,
        "presence_penalty": 0.3,
        "bad_words": ("the", (5, 6)),
        "suppress_tokens": (7, 8),
        "stop_token_ids": (40, 41, 42),
        "ignore_eos": True,
    }
    section = GenerationConfig(max_dec_len=40, seed=3, logit_bias={100: 2.0}, **options)
    [[expected]] = offline.generate(["the cat"], section)
    answer = server.complete(max_tokens=40, seed=3, logit_bias={"100": 2.0}, **options).json()
    assert answer["choices"][0]["text"] == expected.text
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason


def test_what_ends_an_answer_is_not_in_it(server: Server, offline: Generator) -> None:
    """Neither in its text, as in vLLM, nor in its log-probabilities. A token that ends nothing is in both."""
    section = GenerationConfig(decode_strategy="greedy_search", max_dec_len=12, ignore_eos=True)
    [[free]] = offline.generate(["the cat"], section)
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "stop_token_ids": [free.ids[5]]}
    [ended] = server.complete(**body, logprobs=0).json()["choices"]
    place = free.ids.index(free.ids[5])
    assert ended["finish_reason"] == "stop"
    assert ended["text"] == offline.tokenizer.decode(free.ids[:place])
    assert len(ended["logprobs"]["tokens"]) == place
    biased = {"logit_bias": {str(offline.tokenizer.eod_id): 100}, "max_tokens": 3, "logprobs": 0}
    for ignored in (True, False):
        answer = server.complete(**biased, ignore_eos=ignored).json()
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3 * ignored


def test_stop_reasons_and_stops_in_the_text(server: Server, offline: Generator) -> None:
    """Whole and streamed, as vLLM answers them."""
    section = GenerationConfig(decode_strategy="greedy_search", max_dec_len=12, ignore_eos=True)
    [[free]] = offline.generate(["the cat"], section)
    stop = free.text[4:6]
    eos = {"logit_bias": {str(offline.tokenizer.eod_id): 100}}
    for body, reason in (
        ({"ignore_eos": True, "stop": [stop, "never"]}, stop),
        ({"ignore_eos": True, "stop_token_ids": [free.ids[5]]}, free.ids[5]),
        ({"ignore_eos": True}, None),
        (eos, None),
        ({**eos, "ignore_eos": True, "stop_token_ids": [offline.tokenizer.eod_id]}, offline.tokenizer.eod_id),
        ({**eos, "ignore_eos": True, "stop": "<|endoftext|>"}, "<|endoftext|>"),
    ):
        for included in (False, True):
            asked = {
                "max_tokens": 12,
                "temperature": 0,
                "logprobs": 0,
                "include_stop_str_in_output": included,
                **body,
            }
            [choice] = server.complete(**asked).json()["choices"]
            assert choice["stop_reason"] == reason
            options = {key: value for key, value in body.items() if key != "logit_bias"}
            options["logit_bias"] = {int(one): value for one, value in body.get("logit_bias", {}).items()}
            options["include_stop_str_in_output"] = included
            cfg = GenerationConfig(decode_strategy="greedy_search", max_dec_len=12, **options)
            [[same]] = offline.generate(["the cat"], cfg)
            assert (choice["text"], choice["finish_reason"]) == (same.text, same.finish_reason)
            hides_last = "logit_bias" in body or (reason == free.ids[5] and not included)
            assert len(choice["logprobs"]["tokens"]) == len(same.ids) - hides_last
            events = server.complete(**asked, stream=True).text.removesuffix("\n\n").split("\n\n")
            pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            reasons = [(piece["finish_reason"], piece["stop_reason"]) for piece in pieces]
            assert reasons[-1] == (choice["finish_reason"], reason)
            assert set(reasons[:-1]) <= {(None, None)}


def test_the_last_message_is_continued(server: Server, offline: Generator) -> None:
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [*CHAT, {"role": "assistant", "content": "It is"}]
    ids = server.http.post("/tokenize", json={"messages": messages, **asked}).json()["tokens"]
    assert offline.tokenizer.decode(ids).endswith("It is")
    [[expected]] = offline.generate([ids], GenerationConfig(decode_strategy="greedy_search", max_dec_len=9))
    body = {"messages": messages, "max_tokens": 9, "temperature": 0}
    [choice] = server.http.post("/v1/chat/completions", json={**body, **asked}).json()["choices"]
    assert choice["message"]["content"] == expected.text
    error = error_of(
        server.http.post("/v1/chat/completions", json={**body, "continue_final_message": True}), 400
    )
    assert error["message"] == "continue_final_message: needs add_generation_prompt: false"
    assert error["param"] == "continue_final_message"


@needs_llguidance
def test_forms_of_an_answer(client: openai.OpenAI) -> None:
    body = {"model": "gpt", "messages": CHAT, "max_tokens": 400, "seed": 1}
    schema = {"name": "town", "schema": TOOLS[0]["function"]["parameters"]}
    form = {"type": "json_schema", "json_schema": schema}
    text = client.chat.completions.create(**body, response_format=form).choices[0].message.content
    assert json.loads(text)["town"] in ("Oslo", "Rome")
    start = client.chat.completions.create(**body, response_format={"type": "json_object"})
    assert start.choices[0].message.content.lstrip().startswith("{")
    for form, texts in (({"choice": ["a", "b"]}, ("a", "b")), ({"regex": "[xy]"}, ("x", "y"))):
        answer = client.completions.create(
            model="gpt", prompt="x", max_tokens=9, extra_body={"structured_outputs": form}
        )
        assert answer.choices[0].text in texts


@needs_llguidance
@pytest.mark.parametrize("ban", [{"min_tokens": 9}, {"suppress_tokens": [*b"ab"]}, {"bad_words": ["a", "b"]}])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_form_wins_over_bans(server: Server, ban: dict, temperature: int) -> None:
    form = {"choice": ["ab", "ba"]}
    body = {"max_tokens": 9, "n": 3, "seed": 2, "temperature": temperature, "structured_outputs": form}
    for choice in server.complete(**body, **ban).json()["choices"]:
        assert choice["text"] in form["choice"]
        assert choice["finish_reason"] == "stop"


@needs_llguidance
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "light"}),
        ({"type": "function", "function": {"name": "light"}}, {"light"}),
    ],
)
def test_a_forced_call(client: openai.OpenAI, choice: object, names: set[str]) -> None:
    body = {
        "model": "gpt",
        "messages": CHAT,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 600,
        "seed": 5,
    }
    [whole] = client.chat.completions.create(**body).choices
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    [call] = whole.message.tool_calls
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    assert arguments.get("town") in ("Oslo", "Rome") or type(arguments["on"]) is bool
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    assert pieces[-1].finish_reason == "tool_calls"
    [streamed] = pieces[-1].delta.tool_calls
    assert streamed.function.model_dump() == call.function.model_dump()


@needs_llguidance
@pytest.mark.parametrize("given", [{}, {"$id": "https://example.org/tool"}], ids=["no id", "the same id"])
def test_references_in_the_schema_of_a_tool(client: openai.OpenAI, given: dict) -> None:
    """``#`` is the tool's own schema, as pydantic and the ``openai`` client write it."""

    def referring(name: str, meant: dict) -> dict:
        made = tool(name, x={"$ref": "#/$defs/X"})
        made["function"]["parameters"] |= {"$defs": {"X": meant}, **given}
        return made

    tools = [referring("number", {"enum": [3, 4]}), referring("switch", {"type": "boolean"})]
    body = {"model": "gpt", "messages": CHAT, "tools": tools, "max_tokens": 600, "seed": 5, "n": 6}
    answer = client.chat.completions.create(**body, tool_choice="required", parallel_tool_calls=False)
    calls = [call.function for choice in answer.choices for call in choice.message.tool_calls]
    assert {call.name for call in calls} == {"number", "switch"}
    for call in calls:
        possible = {"number": (3, 4), "switch": (True, False)}[call.name]
        assert json.loads(call.arguments)["x"] in possible


@needs_llguidance
@pytest.mark.parametrize("given", [{}, {"parameters": None}, {"parameters": {}}], ids=str)
def test_a_tool_without_parameters_is_called_without_arguments(client: openai.OpenAI, given: dict) -> None:
    chosen = {"type": "function", "function": {"name": "now"}}
    tools = [{"type": "function", "function": {"name": "now", **given}}]
    body = {"model": "gpt", "messages": CHAT, "max_tokens": 600, "seed": 5}
    [choice] = client.chat.completions.create(**body, tools=tools, tool_choice=chosen).choices
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


@needs_llguidance
def test_a_refused_pattern_is_explained(server: Server) -> None:
    answer = server.complete(structured_outputs={"regex": "(?=a)b"})
    assert "look-ahead" in error_of(answer, 400)["message"]


def test_tools_reach_the_template(server: Server, offline: Generator) -> None:
    def count(**more: object) -> int:
        return server.http.post("/tokenize", json={"messages": CHAT, **more}).json()["count"]

    assert count(tools=TOOLS) > count(tools=TOOLS[:1]) > count() == count(tools=TOOLS, tool_choice="none")
    call = {"type": "function", "function": {"name": "light", "arguments": '{"on": true}'}}
    past = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "1"}]},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    body = {"messages": past, "tools": TOOLS, "max_tokens": 8, "reasoning_effort": "low"}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200


def calling(arguments: str) -> list[dict]:
    call = {"type": "function", "function": {"name": "light", "arguments": arguments}}
    return [*CHAT, {"role": "assistant", "tool_calls": [call]}]


CALL = '{"name": "light", "arguments": {"on": true}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("On it. <tool_call>\n" + CALL + "\n</tool_call>", "On it. ", 1),
        ("<tool_call>" + CALL + "</tool_call>\n<tool_call>" + CALL + "</tool_call>", "", 2),
        (f"<tool_call>[{CALL}, {CALL}]", "", 2),
        (CALL.replace("arguments", "parameters"), "", 1),
        (f"[{CALL}]", "", 1),
        ("a < b <tool", "a < b <tool", 0),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', 0),
        ("<tool_call>{", "<tool_call>{", 0),
        ('{"n": 1}', '{"n": 1}', 0),
        ("[" * 5000, "[" * 5000, 0),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_in_a_text(text: str, content: str, calls: int, size: int) -> None:
    answer = AnswerText(["light"], None)
    sent = "".join(answer.feed(text[start : start + size]) for start in range(0, len(text), size))
    rest, found = answer.finish()
    assert sent + rest == content
    assert [one["function"] for one in found] == [{"name": "light", "arguments": '{"on": true}'}] * calls


def test_embeddings(client: openai.OpenAI, offline: Generator) -> None:
    texts = ["the cat", "the other hat " * 60, "the cat", *["x"] * 300]  # more than the queue has places
    answer = client.embeddings.create(model="gpt", input=texts)
    assert [one.index for one in answer.data] == list(range(303))
    first, long, same = (np.array(one.embedding) for one in answer.data[:3])
    assert first.tolist() == same.tolist()
    assert answer.usage.prompt_tokens == sum(len(offline.tokenizer.encode(one)) for one in texts)
    plain = client.embeddings.create(model="gpt", input=texts[1], encoding_format="float").data[0]
    np.testing.assert_allclose(plain.embedding, long, atol=1e-6)
    model = offline.next_token_model.model
    model.eval()
    for text, found in ((texts[0], first), (texts[1], long)):
        ids = offline.tokenizer.encode(text)
        state = (paddle.to_tensor([ids]), paddle.arange(len(ids)).unsqueeze(0))
        with paddle.no_grad():
            for stage in model.stages[:-1]:
                state = stage(state)
        expected = state[0][-1, 0].numpy()
        np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-5)


def test_token_ids_and_their_text(server: Server, offline: Generator) -> None:
    ids = offline.tokenizer.encode("the caté")
    answer = server.http.post("/tokenize", json={"prompt": "the caté", "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 8192)
    assert len(answer["token_strs"]) == len(ids)
    assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "the caté"}
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[300]]}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": "the " * 40_000}, "input"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": calling("{")}, "messages"),
        ("/v1/chat/completions", {"messages": calling("[" * 50_000)}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "structured_outputs": {"json": {"type": "integer", "minimum": 10**30}}},
            "structured_outputs",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "stop_token_ids": [300]}, "stop_token_ids"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, "tool_choice": tool("x")}, "tool_choice"),
    ],
)
def test_a_wrong_request_names_its_parameter(
    server: Server, served_checkpoint: Path, route: str, body: dict, param: str
) -> None:
    answer = server.http.post(route, json=body)
    assert error_of(answer, 400)["param"] == param
    assert str(served_checkpoint) not in answer.text


def test_pages_of_an_allowed_origin_may_ask(strict_server: Server) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in ((ORIGIN, ORIGIN), ("https://other.example", None)):
        answer = strict_server.http.options("/v1/completions", headers={**ask, "Origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed
    answer = strict_server.http.get("/v1/models", headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
