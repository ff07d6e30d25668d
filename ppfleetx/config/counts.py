"""Numbers of things in messages: `1 process`, `2 processes`, `3 corpora`."""

from __future__ import annotations

_IRREGULAR = {"corpus": "corpora", "epoch": "epochs"}


def counted(count: int, noun: str, spec: str = "") -> str:
    """``count``, formatted by ``spec``, and ``noun``: given in the singular, perhaps of several words."""
    *before, last = noun.split(" ")
    if count != 1:
        last = _IRREGULAR.get(last) or last + ("es" if last.endswith(("s", "x", "ch", "sh")) else "s")
    return " ".join([f"{count:{spec}}", *before, last])
