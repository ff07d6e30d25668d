"""Detokenise perplexity benchmarks: remove the spaces that were put around punctuation.

WikiText and Penn Treebank are published as words and punctuation separated by spaces. A model trained on
ordinary text is measured on ordinary text, so the spaces are removed again. The rules and their order are the
ones behind the published numbers of GPT-2 and Megatron-LM (Radford et al. 2019; Shoeybi et al. 2019). Better
rules would give numbers that cannot be compared with these.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import Literal

DetokenizerName = Literal["wikitext", "ptb", "lambada", "none"]


_Rule = Callable[[str], str]


def _literal(*pairs: tuple[str, str]) -> list[_Rule]:
    return [partial(re.compile(re.escape(old)).sub, new) for old, new in pairs]


def _inside(opening: str, closing: str) -> _Rule:
    """Remove spaces just inside a pair of brackets or quotes."""

    def apply(text: str) -> str:
        # No regular expression: it would search to the end of the text at each unclosed pair.
        parts, position = [], 0
        while (start := text.find(opening, position)) >= 0 and (end := text.find(closing, start + 1)) >= 0:
            parts += [text[position : start + 1], text[start + 1 : end].strip(), closing]
            position = end + 1
        return "".join([*parts, text[position:]])

    return apply


_WIKITEXT = [
    *_literal(("s '", "s'")),
    # Meant for years (' 90s), but matches hardly anything. The published numbers include it.
    partial(re.compile(r"/' [0-9]/").sub, "/'[0-9]/"),
    *_literal((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")),
    *_literal(*((f" {sign} ", f"{sign} ") for sign in ":;.!?,")),
    *(_inside(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    *_literal(("= = = =", "===="), ("= = =", "==="), ("= =", "==")),
    *_literal((" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}")),
    *_literal((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
]
_PTB = _literal(
    (" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", "1 "), ("$ 1", "$1"), ("# 1", "#1")
)
_RULES: dict[str, list[_Rule]] = {
    "wikitext": _WIKITEXT,
    "ptb": _PTB,
    "lambada": [],
    "none": [],
}


def detokenizer(name: DetokenizerName) -> Callable[[str], str]:
    """The function that turns a benchmark's text into ordinary text. ``lambada`` and ``none`` change
    nothing."""
    rules = _RULES[name]

    def detokenize(text: str) -> str:
        for rule in rules:
            text = rule(text)
        return text

    return detokenize


def detokenizer_of_file(path: str) -> DetokenizerName:
    """The detokenizer by file name: ``wiki`` or ``ptb`` if the name contains the word, else ``none``."""
    name = PurePath(path).name.lower()
    if "wiki" in name:
        return "wikitext"
    return "ptb" if "ptb" in name else "none"
