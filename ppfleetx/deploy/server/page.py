"""The page to try the model: one file, no other resources."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse, Response

_FILE = Path(__file__).with_name("page.html")


def page_response() -> Response:
    """The page, allowed to run its own script and to talk to this server, and nothing else."""
    html, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


@cache
def _page() -> tuple[str, str]:
    """The page and its Content-Security-Policy."""
    html = _FILE.read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash_of('script', html)}",
            f"style-src {_hash_of('style', html)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return html, policy


def _hash_of(element: str, html: str) -> str:
    found = re.search(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    assert found, f"the page has one <{element}>"
    digest = hashlib.sha256(found.group(1).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
