"""The pictures of the server's page in docs/images.

    ppfleetx serve CHECKPOINT &
    python -m tests.deploy.server.screenshots URL docs/images "Add two numbers." "And of a list?"

asks the questions, with greedy answers, and takes the page in light and in dark.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.deploy.server.browser import Browser, started

WIDTH, HEIGHT = 1100, 760
SYSTEM = "You write Python."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of a server")
    parser.add_argument("directory", type=Path, help="where the pictures go")
    parser.add_argument("questions", nargs="+", help="what is asked, in one chat")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile, started(Path(profile)) as browser:
        browser.resize(WIDTH, HEIGHT)
        browser.open(args.url)
        browser.set(temperature=0, max_tokens=80, system=SYSTEM)
        for question in args.questions:
            _ask(browser, question)
        for theme in ("light", "dark"):
            browser.run(f"useTheme('{theme}')")
            browser.screenshot(args.directory / f"chat_{theme}.png")


def _ask(browser: Browser, question: str) -> None:
    browser.write("prompt", question)
    browser.click("go")
    browser.wait(lambda: " tokens in " in browser.text("note"), "the answer ends", seconds=300)
    browser.run("at('scroll').scrollTop = 1e6")
    print(browser.run("return document.getElementById('log').lastChild.textContent"))
    browser.run("new Promise(done => setTimeout(done, 300))")


if __name__ == "__main__":
    main()
