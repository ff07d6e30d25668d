"""Texts and small tokenizers shared by the tests of tokenizing and preprocessing."""

from __future__ import annotations

import random

from ppfleetx.data.tokenizer.tokenizer import Tokenizer, train_tokenizer

ALPHABETS = [
    (0x00, 0x20), (0x20, 0x7F), (0x61, 0x7B), (0x7F, 0x250), (0x300, 0x370), (0x600, 0x700), (0x2000, 0x2070),
    (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0xE000, 0x10FFFF),
]  # fmt: skip
FRAGMENTS = [
    " ", "  ", "\n", "\n\n", "\t", "\r\n", " " * 17, "\u3000", "\u00a0", "\x1c", "'s", "'S", "'ll", "'Re",
    "''", "<|endoftext|>", "the", " return", "self.", "x1", "123456", "1.5e-3", "...", "!?", "_",
    "e\u0301", "\ufeff",
    "\U0001f469\u200d\U0001f467", "\u4f60\u597d", "\u0e2a\u0e27\u0e31\u0e2a", "=" * 40, "\ufffd", "\x00",
]  # fmt: skip
CORPUS = [
    "def f(self, x):\n    return self.x + x  # the sum\n\n\nclass The:\n    '''It's theirs, we'll see.'''\n"
    * 3,
    "The quick brown fox jumps over the lazy dog; the dogs don't mind. 1234567890 12 34 56.\n" * 4,
    "\u4f60\u597d\u4e16\u754c \u4f60\u597d na\u00efve caf\u00e9 \U0001f600\U0001f600 " * 5,
    "    " * 9 + "x = [1, 2, 3]\n" + "aaaaaaaabababab" * 3 + "--------======== ",
]


def random_text(rng: random.Random) -> str:
    """Fragments and characters of many scripts, in any order; no surrogates."""
    parts = []
    for _ in range(rng.randrange(1, 25)):
        if rng.random() < 0.5:
            parts.append(rng.choice(FRAGMENTS))
        else:
            low, high = rng.choice(ALPHABETS)
            parts.append("".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 6))))
    return "".join(parts)


def small_tokenizer(vocab_size: int = 500) -> Tokenizer:
    """A tokenizer trained on `CORPUS`."""
    return train_tokenizer(CORPUS, vocab_size)
