"""The page in headless Chromium."""

import json
import re
from collections.abc import Callable, Iterator

import pytest

from tests.deploy.server.browser import CONTROL, ENTER, ESCAPE, SHIFT, TAB, Browser, is_installed, started
from tests.deploy.server.conftest import KEY, Server


def test_the_page_allows_itself_and_nothing_else(server: Server) -> None:
    answer = server.http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert "http:" not in answer.text
    assert "https:" not in answer.text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not is_installed():
        pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)")
    with started(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(browser: Browser, url: str, *, mode: str = "chat", **settings: object) -> None:
    """Open the page and change settings, which are hidden at first."""
    browser.open(url)
    browser.run("localStorage.clear()")
    browser.open(url)
    browser.wait(lambda: browser.text("model") == "gpt", "the name of the model is shown")
    if mode != "chat":
        browser.run(f"mode.value = '{mode}'; mode.dispatchEvent(new Event('change'))")
    browser.set(temperature=0, **settings)


def ended(browser: Browser, tokens: int) -> Callable[[], bool]:
    pattern = rf"{tokens} tokens in [\d.]+ s \([\d.]+ per second\), ended by length\."
    return lambda: re.fullmatch(pattern, browser.text("note")) is not None


def ask(browser: Browser, question: str, tokens: int) -> None:
    """Send a question, and wait for its answer of this many tokens."""
    browser.run("say('')")
    browser.set(prompt=question)
    browser.click("go")
    browser.wait(ended(browser, tokens), "the end is reported")


def titles(browser: Browser) -> list[str]:
    """The chats that the page lists."""
    script = (
        "return [...document.querySelectorAll('#chats li button:first-child')].map(one => one.textContent)"
    )
    return list(browser.run(script))


STOP_WHILE_IT_WRITES = """
const text = document.getElementById('text')
new MutationObserver((_, observer) => {
    if (text.textContent.length <= 30) return
    observer.disconnect()
    window.shown = [text.textContent, document.getElementById('note').textContent]
    document.getElementById('stop').click()
}).observe(text, {childList: true, characterData: true, subtree: true})
"""
"""The page itself presses Stop as soon as it has shown some words. Else the model is done before we look."""


def test_text_comes_as_it_is_made_and_can_be_stopped(server: Server, browser: Browser) -> None:
    opened(browser, server.url, mode="text", max_tokens=8000)
    before = server.metric("ppfleetx_generated_tokens_total")
    browser.write("prompt", "the cat")
    browser.run(STOP_WHILE_IT_WRITES)
    browser.click("go")
    browser.wait(lambda: browser.text("note") == "Stopped.", "the page says that it has stopped")
    text, note = browser.run("return window.shown")
    assert text.startswith("the cat") and note == "Writing …"
    server.wait_for_metric("ppfleetx_sequences_running", 0)
    assert server.metric("ppfleetx_generated_tokens_total") - before < 1400, "it would end by itself at 1,411"
    browser.write("prompt", "the <b>hat</b>")
    browser.set(max_tokens=20)
    browser.press(CONTROL, ENTER)
    browser.wait(ended(browser, 20), "the end is reported")
    expected = server.complete(prompt="the <b>hat</b>", temperature=0, max_tokens=20, echo=True)
    assert browser.text("text") == expected.json()["choices"][0]["text"], "markup is only text"


def messages(browser: Browser) -> list[str]:
    script = "return [...document.querySelectorAll('#log .body')].map(one => one.textContent)"
    return list(browser.run(script))


def chat_answer(server: Server, turns: list[dict], tokens: int) -> str:
    body = {"messages": turns, "temperature": 0, "top_p": 0.95, "max_tokens": tokens}
    answer = server.http.post("/v1/chat/completions", json=body)
    return answer.json()["choices"][0]["message"]["content"]


def test_a_chat_with_the_keyboard_alone(server: Server, browser: Browser) -> None:
    """The field has the focus; Enter sends, Escape stops, and each question goes on from what was said."""
    opened(browser, server.url, max_tokens=12, system="Be brief.")
    for keys in (("h",), ("i",), (SHIFT, ENTER), ("x",), (ENTER,)):
        browser.press(*keys)
    browser.wait(ended(browser, 12), "the end is reported")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi\nx"}]
    first = chat_answer(server, turns, 12)
    browser.wait(lambda: messages(browser)[1:] == [shown(first)], "the answer is shown")
    browser.write("prompt", "<i>and</i>")
    browser.press(ENTER)
    browser.wait(lambda: len(messages(browser)) == 4 and ended(browser, 12)(), "the end is reported")
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "<i>and</i>"}]
    second = chat_answer(server, turns, 12)
    browser.wait(lambda: messages(browser)[2:] == ["<i>and</i>", shown(second)], "the second answer is shown")
    browser.set(max_tokens=8000)
    browser.write("prompt", "the cat")
    browser.press(ENTER)
    browser.wait(
        lambda: len(messages(browser)) == 6 and len(messages(browser)[5]) > 30, "it is being written"
    )
    browser.press(ESCAPE)
    browser.wait(lambda: browser.text("note") == "Stopped.", "it stops")
    server.wait_for_metric("ppfleetx_sequences_running", 0)
    assert len(messages(browser)[5]) > 30, "and what was said stays"


def test_a_conversation_that_outgrows_the_model_goes_on(server: Server, browser: Browser) -> None:
    """As in the terminal, the oldest question and its answer are left out."""
    opened(browser, server.url, max_tokens=12)
    ask(browser, "the cat " * 2500, 12)
    second = "and the hat " * 1500
    browser.set(prompt=second)
    browser.click("go")
    browser.wait(
        lambda: "no room for the oldest 2 messages" in browser.text("note"), "it says what it left out"
    )
    expected = chat_answer(server, [{"role": "user", "content": second}], 12)
    browser.wait(lambda: messages(browser)[3:] == [shown(expected)], "the answer is shown")


def test_the_defaults_fit_the_model_and_a_narrow_page_begins_new_chats(
    server: Server, browser: Browser
) -> None:
    opened(browser, server.url)
    assert int(browser.get("max_tokens", "value")) == 256
    served = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert served == 8192
    width = "return matchMedia('(max-width: 44rem)').matches"
    browser.resize(500, 800)
    try:
        assert browser.run(width)
        assert browser.get("new", "getBoundingClientRect().width") > 0
        browser.resize(390, 844)  # a telephone
        assert browser.run("return document.documentElement.scrollWidth") == 390
        assert browser.run("return document.querySelector('header').offsetHeight") < 60, "one line"
        # Chats that another tab has kept are there at once, in one line.
        kept = [
            {"id": str(one), "system": "", "messages": [{"role": "user", "content": f"kept {one} " * 9}]}
            for one in range(20)
        ]
        browser.run(
            f"localStorage.setItem(CHATS, {json.dumps(json.dumps(kept))}); "
            "dispatchEvent(new StorageEvent('storage', { key: CHATS }))"
        )
        assert browser.run("return document.documentElement.scrollWidth") == 390
        assert 0 < int(browser.get("chats", "offsetHeight")) < 70
        browser.run("document.querySelector('#chats li button').click()")
        assert messages(browser) == ["kept 0 " * 9]
    finally:
        browser.run("localStorage.clear()")
        browser.resize(1200, 900)


def shown(text: str) -> str:
    """As the page shows a text without code: a line's end at the end of a paragraph is not seen."""
    return text.removesuffix("\n") if text.strip() else ""


def test_chats_are_kept_until_they_are_deleted(server: Server, browser: Browser) -> None:
    opened(browser, server.url, max_tokens=3)
    for question in ("the first", "the second"):
        browser.click("new")
        ask(browser, question, 3)
    browser.open(server.url)
    browser.wait(lambda: titles(browser) == ["the second", "the first"], "they are listed")
    assert messages(browser) == []
    browser.run("document.querySelectorAll('#chats li button:first-child')[1].click()")
    assert messages(browser)[0] == "the first"
    assert len(messages(browser)) == 2
    browser.run("document.querySelectorAll('#chats li button:last-child')[1].click()")
    assert messages(browser) == []
    assert titles(browser) == ["the second"]


def press_small(browser: Browser, label: str, place: int) -> None:
    """Press one of the small buttons of the messages; -1 is the last one."""
    buttons = f"[...document.querySelectorAll('#log button')].filter(one => one.textContent === '{label}')"
    browser.run(f"{buttons}.at({place}).click()")


def test_a_question_is_edited_an_answer_made_again_and_a_conversation_saved(
    server: Server, browser: Browser
) -> None:
    opened(browser, server.url, max_tokens=6, system="Be brief.")
    for question in ("the first", "the second"):
        ask(browser, question, 6)
    browser.run("say('')")
    before = messages(browser)
    press_small(browser, "Again", -1)
    browser.wait(ended(browser, 6), "the end is reported")
    assert messages(browser) == before, "the likeliest tokens once more, in the same place"
    press_small(browser, "Edit", 0)
    assert messages(browser) == []
    assert browser.get("prompt", "value") == "the first"
    browser.click("new")
    assert titles(browser) == ["the first"], "a question that was not asked again changes nothing"
    browser.run("document.querySelector('#chats li button').click()")
    assert messages(browser) == before
    press_small(browser, "Edit", 0)
    ask(browser, "another", 6)
    assert messages(browser)[0] == "another" and len(messages(browser)) == 2
    browser.run(
        "URL.createObjectURL = blob => { blob.text().then(text => { window.saved = text; }); return '#'; }"
    )
    browser.click("save")
    browser.wait(lambda: browser.run("return window.saved") is not None, "it is saved")
    saved = str(browser.run("return window.saved"))
    assert saved.startswith("**System**\n\nBe brief.\n\n**You**\n\nanother\n\n**gpt**\n\n")


def test_code_is_monospaced_and_can_be_copied(server: Server, browser: Browser) -> None:
    opened(browser, server.url)
    text = "Use `len`:\n\n```python\nprint(len([1]))  # <b>one</b>\n```\nor\n\n```\nan open one\n"
    browser.run(f"showMessage({{ role: 'assistant', content: {json.dumps(text)} }})")
    code = "[...document.querySelectorAll('#log pre code')]"
    blocks = browser.run(f"return {code}.map(one => one.textContent)")
    assert blocks == ["print(len([1]))  # <b>one</b>\n", "an open one\n"]
    assert "mono" in str(browser.run(f"return getComputedStyle({code}[0]).fontFamily"))
    assert browser.run("return document.querySelector('#log p code').textContent") == "len"
    assert browser.run("return document.querySelector('#log pre span').textContent") == "python"
    copied = "let copied; navigator.clipboard.writeText = async text => { copied = text; };"
    buttons = "[...document.querySelectorAll('#log button')].filter(one => one.textContent === 'Copy')"
    click = f"{buttons}.forEach(one => {{ one.click(); seen.push(copied); }});"
    found = browser.run(f"{copied} const seen = []; {click} return seen")
    assert found == [text, *blocks]


def test_what_the_server_refuses_is_shown(server: Server, browser: Browser) -> None:
    """A message that alone is too long."""
    opened(browser, server.url, max_tokens=20)
    question = "the cat " * 9000
    browser.set(prompt=question)
    browser.click("go")
    browser.wait(lambda: browser.text("note").startswith("messages: "), "the message is shown")
    assert browser.get("note", "className") == "bad"
    assert browser.get("go", "disabled") is False
    assert messages(browser) == []
    assert browser.get("prompt", "value") == question, "to be sent again"


def test_a_key_is_asked_for(strict_server: Server, browser: Browser) -> None:
    browser.open(strict_server.url)
    browser.wait(lambda: not browser.get("keybox", "hidden"), "a field appears")
    assert browser.text("note").startswith("a key is needed")
    browser.write("key", "wrong")
    browser.press(ENTER)
    browser.wait(lambda: browser.text("note") == "the key is wrong", "it is refused")
    browser.write("key", KEY)
    browser.press(TAB)
    browser.wait(lambda: browser.text("model") == "tiny", "it is taken")
    browser.set(max_tokens=5)
    browser.write("prompt", "the cat")
    browser.click("go")
    browser.wait(lambda: " tokens in " in browser.text("note"), "it is used")
