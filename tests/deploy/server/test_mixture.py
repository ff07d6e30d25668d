"""A mixture of experts of Hugging Face's, served: it continues prompts as transformers does."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppfleetx.conversion.convert import Conversion, convert
from tests.conversion.test_mixtures import GOLDENS, golden, write
from tests.deploy.server.conftest import Server

NEW = 12
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def letters() -> str:
    """What the model's tokens stand for, a letter each."""
    config, _, _ = golden("mixtral")
    return (string.ascii_letters + string.digits)[: config["vocab_size"]]


@pytest.fixture(scope="module")
def server(letters: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("mixture")
    source = write(root / "hf", "mixtral")
    tokenizer = json.loads((GOLDENS / "tokenizers" / "gpt2" / "tokenizer.json").read_text())
    tokenizer["model"] |= {"vocab": {letter: number for number, letter in enumerate(letters)}, "merges": []}
    tokenizer["added_tokens"] = []
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": letters[2], "chat_template": TEMPLATE}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    convert(Conversion("hf", "ppfleetx", source, root / "run"))
    shutil.copy(root / "run" / "config.yaml", root)
    server = Server(root, root / "log.txt")
    yield server
    server.stop()


def test_two_requests_at_once_are_continued_as_transformers_does(server: Server, letters: str) -> None:
    rows = json.loads((GOLDENS / "hf_moe_generate.json").read_text())["mixtral"]
    rows = [(prompt, following[:NEW]) for prompt, following in rows if 2 not in following[:NEW]]  # 2 ends one

    def text_of(prompt: list[int]) -> str:
        answer = server.complete(prompt=prompt, max_tokens=NEW, temperature=0)
        return answer.raise_for_status().json()["choices"][0]["text"]

    with ThreadPoolExecutor(2) as pool:
        texts = [*pool.map(text_of, [prompt for prompt, _ in rows])]
    assert texts == ["".join(letters[token] for token in following) for _, following in rows]


def test_the_chat_page_and_its_answers(server: Server) -> None:
    assert "<html" in server.http.get("/").raise_for_status().text
    said = server.complete(prompt="quick", max_tokens=NEW, temperature=0).raise_for_status().json()
    body = {"messages": [{"role": "user", "content": "quick"}], "max_tokens": NEW, "temperature": 0}
    answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == said["choices"][0]["text"]
