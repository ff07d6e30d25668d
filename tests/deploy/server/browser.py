"""Headless Chromium, driven through chromedriver by W3C's WebDriver protocol.

Both are packages of Debian (chromium, chromium-driver).
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from tests.helpers.ranks import free_port

ENTER, ESCAPE, TAB, CONTROL, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue009", "\ue008"
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


def is_installed() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


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

    def set(self, **values: object) -> None:
        """Set what fields hold, by the ids of their elements."""
        for name, value in values.items():
            self.run(f"document.getElementById('{name}').value = {json.dumps(value)}")

    def get(self, element_id: str, name: str) -> object:
        """A property of an element."""
        return self.run(f"return document.getElementById('{element_id}').{name}")

    def press(self, *keys: str) -> None:
        """Keys on whatever has the focus, held down together."""
        actions = [{"type": "keyDown", "value": key} for key in keys]
        actions += [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def run(self, script: str) -> object:
        return self._post("/execute/sync", script=script, args=[])

    def text(self, element_id: str) -> str:
        return str(self.get(element_id, "textContent"))

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}; the page says: {self.text('note')}"
            time.sleep(0.02)

    def resize(self, width: int, height: int) -> None:
        self._post("/window/rect", width=width, height=height)

    def screenshot(self, path: Path) -> None:
        answer = self._http.get(self._session + "/screenshot").json()
        path.write_bytes(base64.b64decode(answer["value"]))

    def _find(self, element_id: str) -> str:
        found = self._post("/element", using="css selector", value=f"#{element_id}")
        return next(iter(found.values()))

    def _post(self, path: str, **body: object):
        answer = self._http.post(self._session + path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


@contextlib.contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """A session with a profile of its own; ended behind."""
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
        opened = Browser(url, profile)
        yield opened
        opened.close()
    finally:
        process.terminate()
        process.wait(10)
