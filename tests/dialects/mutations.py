"""Damaged command lines and files of other toolkits: each is accepted, or one sentence says what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_tree
from ppfleetx.dialects.translation import Translation

VALUES = (
    "", "0", "-1", "1", "3", "7.5", "1e400", "nan", "true", "None", "[]", "[1,2]", "{}", "x", "ä" * 3,
    "a" * 5000,
    "1" * 80, "0x10", "2e-5", "[[1,2],[3]]", "[[[[", "&a", "*a", "!!python/object:os.system", "\0", "\ud800",
    "../../etc", "/dev/full", "99999999999999999999", "1,2,3", "(128,0)", "--", "#", "null",
)  # fmt: skip


def mutated_words(words: Sequence[str], number: int) -> list[str]:
    """The command line with a few changes that ``number`` decides."""
    rng = random.Random(number)
    words = list(words)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(words))
        match rng.randrange(6):
            case 0:
                words[at] = rng.choice(VALUES)
            case 1:
                del words[at]
            case 2:
                words.insert(at, rng.choice([*VALUES, *words]))
            case 3:
                words[at] = _misspelt(words[at], rng)
            case 4:
                name = rng.choice([word for word in words if word.startswith("--")] or ["--x"])
                words[at : at + 1] = [f"{name}={rng.choice(VALUES)}"]
            case 5:
                other = rng.randrange(len(words))
                words[at], words[other] = words[other], words[at]
        words = words or ["--x"]
    return words


def mutated_text(text: str, number: int) -> str:
    """The file's text with a few changes that ``number`` decides."""
    rng = random.Random(number)
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        key, colon, _ = lines[at].partition(":")
        match rng.randrange(6):
            case 0:
                lines[at] = f"{key}{colon} {rng.choice(VALUES)}"
            case 1:
                del lines[at]
            case 2:
                lines.insert(at, rng.choice(lines))
            case 3:
                lines[at] = _misspelt(lines[at], rng)
            case 4:
                lines[at] = " " * rng.randrange(8) + lines[at].lstrip()
            case 5:
                lines[at] = (
                    f"{key}{colon}\n{' ' * rng.randrange(8)}{rng.choice(VALUES)}: {rng.choice(VALUES)}"
                )
        lines = lines or ["x: 1"]
    return "\n".join(lines)


def _misspelt(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) + 1)
    return word[:at] + rng.choice("xX_-.:[{'\"\t0 ") + word[at + rng.randrange(2) :]


def outcome(translate: Callable[[], Translation], *, world_size: int | None = None) -> str:
    """``accepted``, or the message; anything but a message of one place and rule is an error of the test."""
    try:
        result = translate()
        load_tree(result.tree(), result.warnings, world_size=world_size)
        result.yaml()
    except ConfigError as error:
        message = str(error)
        assert message.strip(), "an error without words"
        assert error.place or error.key, f"neither key nor place: {message}"
        assert len(message) < 6000, message[:200]
        return message
    return "accepted"
