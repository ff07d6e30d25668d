"""The messages that docs/troubleshooting.md explains are messages of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^\*\*(.*`.*`.*)\*\*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@cache
def texts_of_the_code() -> tuple[str, ...]:
    """Every literal text, those with values in them with ``…`` in the values' place."""
    texts = []
    for path in sorted((ROOT / "ppfleetx").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(_part(part) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return tuple(texts)


def _part(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "…"


def test_the_page_explains_enough():
    assert len(re.findall(r"^\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) >= 20
    assert len(QUOTED) >= 12


def test_the_translated_page_explains_the_same_messages():
    translated = ROOT / "docs" / "zh" / "troubleshooting.md"
    quoted = [
        re.findall(r"^\*\*(.*)\*\*$", page.read_text(encoding="utf-8"), re.MULTILINE)
        for page in (PAGE, translated)
    ]
    messages, translated_messages = ([re.findall(r"`[^`]*`", heading) for heading in page] for page in quoted)
    assert messages == translated_messages


@pytest.mark.parametrize("heading", QUOTED)
def test_a_quoted_message_is_one_of_the_code(heading):
    for quoted in re.findall(r"`([^`]*)`", heading):
        if quoted.startswith("avg_"):
            continue  # a word of the log line
        fragments = [piece.strip(" ,") for piece in re.split(r"…|[A-Z]{4,}", quoted)]
        longest = max(fragments, key=len)
        assert len(longest) >= 7, f"{quoted!r} says too little to be found"
        assert any(longest in text for text in texts_of_the_code()), f"no message has {longest!r}"
