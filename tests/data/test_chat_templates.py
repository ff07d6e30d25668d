"""Chat templates render as ``apply_chat_template`` does (recipe: tests/goldens/make_hf_chats.py); limits
stop endless and growing ones."""

import json
import threading
from pathlib import Path

import pytest

from ppfleetx.checkpoint.config_and_tokenizer import copy_tokenizer
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.data.chat.templates import PLAIN, ChatError, ChatTemplate, find_template
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.goldens.chat_styles import STYLES, write_style

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens/hf_chats.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(style: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_style(style, tmp_path_factory.mktemp("style") / style)


def options_of(row: dict) -> dict:
    given = {key: row[key] for key in ("add_generation_prompt", "tools", "documents") if key in row}
    return given | row["variables"]


def test_texts_and_ids_are_those_of_transformers(style: str, directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.special_token_texts == GOLDEN[style]["special_tokens"]
    assert len(GOLDEN[style]["rows"]) >= 14
    for row in GOLDEN[style]["rows"]:
        template = find_template(tokenizer, row.get("template", "default"))  # the recipe names it, too
        if "error" in row:
            with pytest.raises(ChatError) as caught:
                template.render(row["messages"], **options_of(row))
            assert row["error"] in str(caught.value)
            continue
        text, spans = template.render_spans(row["messages"], **options_of(row))
        assert text == row["text"]
        assert template.encode(tokenizer, row["messages"], **options_of(row)) == row["ids"]
        if row.get("continued", "") is None:
            with pytest.raises(ChatError, match="does not write the text of the last message"):
                template.render(row["messages"], continue_final_message=True, **options_of(row))
        elif "continued" in row:
            open_end = template.render(row["messages"], continue_final_message=True, **options_of(row))
            assert open_end == row["continued"]
        ids, marked = tokenizer.encode_marked(text, spans)
        assert ids.tolist() == row["ids"]
        assert marked.nonzero()[0].tolist() == row["assistant"], text


def test_saved_it_keeps_its_templates(directory: Path, tmp_path: Path) -> None:
    """Those of a directory of their own are then listed in the configuration."""
    tokenizer = Tokenizer.load(directory)
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).chat_templates == tokenizer.chat_templates
    assert not (tmp_path / "additional_chat_templates").exists()


def test_a_copy_as_conversions_make_it_keeps_its_templates(directory: Path, tmp_path: Path) -> None:
    copy_tokenizer(directory, tmp_path / "copy")
    assert all(path.is_file() for path in (tmp_path / "copy").iterdir()), (
        "a checkpoint has room for files alone"
    )
    assert Tokenizer.load(tmp_path / "copy").chat_templates == Tokenizer.load(directory).chat_templates


def test_a_conversation_with_tools_has_a_template_of_its_own(tmp_path: Path) -> None:
    """As in transformers, where no template is named."""
    template = find_template(Tokenizer.load(write_style("qwen", tmp_path / "qwen")))
    for messages, text in ((USER, "add;1<|begin_of_text|>"), (USER * 2, "add;2<|begin_of_text|>")):
        assert template.render(messages, tools=[{"name": "add"}]) == text
    assert template.render(USER).startswith("<|im_start|>system")
    named = find_template(Tokenizer.load(tmp_path / "qwen"), "default")
    assert named.render(USER, tools=[{"name": "add"}]) == template.render(USER)


def test_an_unknown_template_name_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_style("qwen", tmp_path / "qwen"))
    with pytest.raises(ConfigError, match="no chat template 'rag'; it has: default, tool_use"):
        find_template(tokenizer, "rag")
    config = json.loads((tmp_path / "qwen/tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": 3}]
    (tmp_path / "qwen/tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="chat_template must be a text, or a list of name and template"):
        find_template(Tokenizer.load(tmp_path / "qwen"))


def test_a_model_without_template_gets_the_plain_one() -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[1] / "goldens/tokenizers/gpt2")
    template = find_template(tokenizer)
    assert (template.is_plain, template.source) == (True, PLAIN)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello\n"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    text, spans = template.render_spans(messages, add_generation_prompt=True)
    expected = "System: Be brief.\n\nUser: Hello\n\nAssistant: Hi.<|endoftext|>\n\nUser: Bye\n\nAssistant:"
    assert text == expected
    assert [text[slice(*span)] for span in spans] == [" Hi.<|endoftext|>"]
    assert all(stop in f"{text}\nUser: x\nSystem: y" for stop in template.stops)


def test_threads_render_at_the_same_time() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    template = ChatTemplate(source, {})
    found: dict[int, bool] = {}

    def work(number: int) -> None:
        messages = [{"role": "user", "content": "x" * number} for _ in range(200)]
        text, spans = template.render_spans(messages)
        right = all(text[slice(*span)] == "x" * number for span in spans)
        found[number] = right and len(spans) == 200

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(1, 9), True)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{{% set n = namespace(x='a') %}}{{% for i in range(60) %}}{{% set n.x = {} %}}{{% endfor %}}"
REFUSED = {
    "loops": (ENDLESS, "takes more than 3,000,000 steps"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "range": ("{% for a in range(10 ** 9) %}{% endfor %}", "range"),
    "texts": ("{{ 'a' * 10 ** 10 }}", "size 10,000,000,000"),
    "doubling": (GROWING.format("n.x + n.x"), "a text, list or number of size"),
    "joining": (GROWING.format("n.x ~ n.x"), "a text, list or number of size"),
    "powers": ("{{ 9 ** 99999999 }}", "a text, list or number of size"),
    "filter": ("{{ 'a' | center(999999999) }}", "calls center with 999999999"),
    "method": ("{{ 'a'.ljust(999999999) }}", "calls ljust with 999999999"),
    "class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "change": ("{{ messages.append(1) }}", "uses what templates may not access"),
    "file": ("{% include '/etc/passwd' %}", "fails"),
    "undefined": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "types": ("{{ 'a' + 1 }}", "fails on this conversation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_fail_are_refused_in_words(name: str) -> None:
    source, words = REFUSED[name]
    with pytest.raises(ChatError) as caught:
        ChatTemplate(source, {}, "the template of m").render(USER)
    assert words in str(caught.value)
    assert "the template of m" in str(caught.value)


def test_what_is_no_template_is_refused_with_its_line() -> None:
    for source, words in (
        ("a\n{% for %}", "line 2: Expected"),
        ("{% generation %}", "line 1: "),
    ):
        with pytest.raises(DataError, match=words):
            ChatTemplate(source, {}, "the template of m").render(USER)
    with pytest.raises(ChatError, match="at least one message"):
        ChatTemplate("", {}).render([])
    for wrong in ({"content": "x"}, "x", {"role": 1, "content": "x"}):
        with pytest.raises(ChatError, match="a message is an object with role and content"):
            ChatTemplate("x", {}).render([wrong])
