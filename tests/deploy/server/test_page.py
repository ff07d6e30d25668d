"""The page in headless Chromium, driven through chromedriver by W3C's WebDriver protocol.

Both are packages of Debian (chromium, chromium-driver).
"""

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.server.conftest import KEY, Server
from tests.helpers.ranks import free_port

ENTER, ESCAPE, TAB, CONTROL = "\ue007", "\ue00c", "\ue004", "\ue009"
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--no-first-run",
]


def test_the_page_allows_itself_and_nothing_else(server: Server) -> None:
    answer = server.http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert "http:" not in answer.text
    assert "https:" not in answer.text


class Browser:
    """One WebDriver session."""

    def __init__(self, driver_url: str, profile: Path) -> None:
        self._http = httpx.Client(base_url=driver_url, timeout=30)
        options = {"binary": shutil.which("chromium"), "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        self._session = ""
        answer = self._post("/session", capabilities={**wanted, "firstMatch": [{}]})
        self._session = f"/session/{answer['sessionId']}"

    def close(self) -> None:
        self._http.delete(self._session)
        self._http.close()

    def open(self, url: str) -> None:
        self._post("/url", url=url)

    def click(self, element_id: str) -> None:
        self._post(f"/element/{self._find(element_id)}/click")

    def write(self, element_id: str, text: str) -> None:
        """Replace what a field holds."""
        self._post(f"/element/{self._find(element_id)}/clear")
        self._post(f"/element/{self._find(element_id)}/value", text=text)

    def press(self, *keys: str) -> None:
        """Keys on whatever has the focus, held down together."""
        actions = [{"type": "keyDown", "value": key} for key in keys]
        actions += [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def run(self, script: str) -> object:
        return self._post("/execute/sync", script=script, args=[])

    def text(self, element_id: str) -> str:
        return str(self.run(f"return document.getElementById('{element_id}').textContent"))

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}; the page says: {self.text('note')}"
            time.sleep(0.02)

    def _find(self, element_id: str) -> str:
        found = self._post("/element", using="css selector", value=f"#{element_id}")
        return next(iter(found.values()))

    def _post(self, path: str, **body: object):
        answer = self._http.post(self._session + path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)")
    port = free_port()
    process = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/status").json()["value"]["ready"]:
                    break
            time.sleep(0.05)
        opened = Browser(url, tmp_path_factory.mktemp("profile"))
        yield opened
        opened.close()
    finally:
        process.terminate()
        process.wait(10)


def test_text_comes_as_it_is_made_and_can_be_stopped(server: Server, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait(lambda: browser.text("model") == "gpt", "the name of the model is shown")
    browser.write("prompt", "the cat")
    browser.write("max_tokens", "8000")
    browser.run("document.getElementById('temperature').value = 0")
    browser.click("go")
    browser.wait(lambda: len(browser.text("text")) > 30, "text is shown while it is made")
    assert browser.text("text").startswith("the cat")
    assert browser.text("note") == "Writing …"
    assert server.metric("ppfleetx_sequences_running") == 1
    browser.click("stop")
    browser.wait(lambda: browser.text("note") == "Stopped.", "the page says that it has stopped")
    server.wait_for_metric("ppfleetx_sequences_running", 0)


def test_the_keyboard_is_enough(server: Server, browser: Browser) -> None:
    """The prompt has the focus; Ctrl+Enter starts, Escape stops, and a whole answer is the server's."""
    browser.open(server.url)
    # Right after a page is opened, a headless browser may lose keys: it has not yet got the focus itself.
    browser.wait(lambda: browser.text("model") == "gpt", "the name of the model is shown")
    browser.press("!")
    assert browser.run("return document.getElementById('prompt').value.includes('!')")
    browser.write("prompt", "the <b>hat</b>")
    browser.press(TAB)
    assert browser.run("return document.activeElement.id") == "max_tokens"
    browser.write("max_tokens", "20")
    browser.run("document.getElementById('temperature').value = 0")
    browser.press(CONTROL, ENTER)
    pattern = r"20 tokens in [\d.]+ s \([\d.]+ per second\), ended by length\."
    browser.wait(lambda: re.fullmatch(pattern, browser.text("note")) is not None, "the end is told")
    expected = server.complete(prompt="the <b>hat</b>", temperature=0, max_tokens=20, echo=True)
    assert browser.text("text") == expected.json()["choices"][0]["text"], "markup is only text"
    browser.write("max_tokens", "8000")
    browser.press(CONTROL, ENTER)
    browser.wait(lambda: browser.text("note") == "Writing …", "it goes on")
    browser.press(ESCAPE)
    browser.wait(lambda: browser.text("note") == "Stopped.", "it stops")


def test_what_the_server_refuses_is_shown(server: Server, browser: Browser) -> None:
    browser.open(server.url)
    browser.write("max_tokens", "9000")
    browser.click("go")
    browser.wait(lambda: browser.text("note").startswith("max_tokens: "), "the message is shown")
    assert browser.run("return document.getElementById('note').className") == "bad"
    assert browser.run("return document.getElementById('go').disabled") is False


def test_a_key_is_asked_for(strict_server: Server, browser: Browser) -> None:
    browser.open(strict_server.url)
    browser.wait(lambda: browser.run("return !document.getElementById('keybox').hidden"), "a field appears")
    assert browser.text("note").startswith("a key is needed")
    browser.write("key", "wrong")
    browser.press(ENTER)
    browser.wait(lambda: browser.text("note") == "the key is wrong", "it is refused")
    browser.write("key", KEY)
    browser.press(TAB)
    browser.wait(lambda: browser.text("model") == "tiny", "it is taken")
    browser.write("max_tokens", "5")
    browser.run("document.getElementById('temperature').value = 0")
    browser.click("go")
    browser.wait(lambda: browser.text("note").startswith("5 tokens"), "it is used")
