"""What can be wrong with a configuration: changes of its text, and overrides that nobody should write."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

from ppfleetx.config.field_types import all_keys, field_types, members, section_in
from ppfleetx.config.registry import Registered
from ppfleetx.config.sections.root import RunConfig

_KEY = re.compile(rb"^(\s*)([A-Za-z_0-9]+):", re.MULTILINE)
_VALUE = re.compile(rb"^(\s*[A-Za-z_0-9]+: )(\S.*)$", re.MULTILINE)
_PLAUSIBLE_WORDS = """
    0 1 2 3 4 8 16 24 100 128 1024 65536 1000000 0.0 0.1 0.5 1.0 1e-5 1e-3 true false null auto cpu gpu
    step epoch loss metric O1 O2 float16 bfloat16 full core_attn cosine linear rope none swiglu gelu
    RMSNorm GPTModule GPTFinetuneModule SST2 PromptResponseDataset GPTDataset beam_search [1,1]
    [6,6,6,6] [969,30,1] ./data x
"""
_ODD_WORDS = """
    ~ yes off -1 1.5 -0.5 .5 1e999 .inf .nan 007 0x10 1_000 2147483648 9223372036854775808 1000000000000
    None nan '' [] {} [[]] [{}] [-1] [0,0,0] [null] {a:1} {a:{b:[c]}} {'':1} '12' *x &x
    !!python/object:os.system !!binary [ { } : , - ? | ' % @ ` # 2022-01-01 12:30 /dev/null . ~root
    ${HOME} %s GPT-cn MoEModule o2 ² é 数据 \u200b 🙂
"""
_PLAUSIBLE, _ODD = _PLAUSIBLE_WORDS.split(), _ODD_WORDS.split()
_STRANGE = ("\ufeff", "\u200b", "\u202e", "\u2028", "\xa0", "²", "🙂", "\0", "\x1b", "\t")


def value(rng: random.Random) -> str:
    """Text of a value: one that is right somewhere, or hardly anywhere."""
    kind = rng.random()
    if kind < 0.05:
        return "".join(rng.choice(string.printable) for _ in range(rng.randrange(1, 30)))
    if kind < 0.15:
        return str(rng.choice((1, -1)) * rng.randrange(10 ** rng.randrange(1, 25)))
    return rng.choice(_ODD if kind < 0.5 else _PLAUSIBLE)


def _fitting(annotation: Any, rng: random.Random) -> str:
    """Text of a value of this type."""
    part = rng.choice(members(annotation))
    if part is type(None):
        return "null"
    if get_origin(part) is Annotated:
        for meta in part.__metadata__:
            if isinstance(meta, Registered):
                return rng.choice(meta.registry.names())
        return _fitting(get_args(part)[0], rng)
    if get_origin(part) is Literal:
        return str(rng.choice(get_args(part)))
    if get_origin(part) is tuple:
        return f"[{', '.join(_fitting(get_args(part)[0], rng) for _ in range(rng.randrange(5)))}]"
    if get_origin(part) is dict:
        return f"{{k: {_fitting(get_args(part)[1], rng)}}}"
    if part is bool:
        return rng.choice(("true", "false"))
    if part is int:
        return str(rng.choice((0, 1, 1, 2, 2, 3, 4, 5, 8, 16, 24, 96, 1000, 1024, 2**20, 2**31 - 1, 10**12)))
    if part is float:
        return rng.choice(("0", "1e-5", "0.1", "0.5", "1", "1.0", "2.5", "1e30"))
    return rng.choice(("x", "./data", "''", "a b", "{}"))


def _some_key_and_value(rng: random.Random) -> tuple[str, str]:
    """A key of the schema, and a value of its type or another."""
    key = rng.choice(all_keys(RunConfig))
    annotation: Any = RunConfig
    for part in key.split("."):
        annotation = field_types(section_in(annotation))[part]
    return key, _fitting(annotation, rng) if rng.random() < 0.6 else value(rng)


def _typo(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word)) if word else 0
    letter = rng.choice(string.ascii_letters + string.digits + "_-. \t'\"é²\u200b")
    swapped = word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :]
    new = word[:at] + letter + word[at:]
    return rng.choice((word[:at] + word[at + 1 :], new, swapped, word.upper(), word * 2, letter, ""))


def _change_key(text: bytes, rng: random.Random) -> bytes:
    found = list(_KEY.finditer(text))
    if not found:
        return text
    match = rng.choice(found)
    elsewhere = rng.choice(found)[2].decode()
    foreign = rng.choice(("tensor_parallel_degree", "num_hidden_layers", "<<", "_base_", "? a"))
    new = rng.choice((*[_typo(match[2].decode(), rng)] * 7, elsewhere, foreign))
    return text[: match.start(2)] + new.encode("utf-8", "surrogatepass") + text[match.end(2) :]


def _change_value(text: bytes, rng: random.Random) -> bytes:
    found = list(_VALUE.finditer(text))
    if not found:
        return text
    match = rng.choice(found)
    return text[: match.start(2)] + value(rng).encode("utf-8", "surrogatepass") + text[match.end(2) :]


def _add_value(text: bytes, rng: random.Random) -> bytes:
    """A key of the schema that the file does not have, or has elsewhere, in its section or at the end."""
    key, given = _some_key_and_value(rng)
    *sections, name = key.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    lines.append(f"{'  ' * len(sections)}{name}: {given}")
    head = re.search(rb"^" + re.escape(lines[0].encode()) + rb" *$", text, re.MULTILINE)
    added = b"\n" + "\n".join(lines[1:] if head else lines).encode("utf-8", "surrogatepass") + b"\n"
    return text + added if head is None else text[: head.end()] + added + text[head.end() :]


def _change_lines(text: bytes, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        del lines[min(one, other) : max(one, other) + 1]
    elif kind == 1:
        lines.insert(other, lines[one])
    elif kind == 2:
        lines[one], lines[other] = lines[other], lines[one]
    elif kind == 3:
        lines[one] = b"  " * rng.randrange(1, 5) + lines[one]
    elif kind == 4:
        lines[one] = lines[one].lstrip()
    else:
        lines.insert(one, rng.choice((b"---\n", b"...\n", b"\t\n", b"%TAG !a! b\n", b"? \n", b"- 1\n")))
    return b"".join(lines)


def _change_bytes(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text) + 1)
    before, after, strange = text[:at], text[at:], rng.choice(_STRANGE).encode()
    encoded = text.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-8-sig")))
    return rng.choice((before, before + rng.randbytes(3) + after, before + strange + after, encoded))


_MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *[_change_key] * 2,
    *[_change_value] * 6,
    *[_add_value] * 4,
    *[_change_lines] * 2,
    *[_change_bytes] * 2,
)


def mutated(text: bytes, rng: random.Random) -> tuple[bytes, list[str]]:
    """``text`` with one to three changes, and what they are called."""
    what = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        mutation = rng.choice(_MUTATIONS)
        if text:
            text = mutation(text, rng)
            what.append(mutation.__name__.strip("_"))
    return text, what


def override(rng: random.Random) -> str:
    """Text of one override: a key of the schema, whole or damaged, and some value."""
    key, given = _some_key_and_value(rng)
    kind = rng.random()
    if kind < 0.12:
        parts = key.split(".")
        at = rng.randrange(len(parts))
        parts[at] = _typo(parts[at], rng)
        key = ".".join(parts)
    elif kind < 0.2:
        key += rng.choice((".0", ".1", ".²", ".x", ".-1", ".a.b.c", "..."))
    elif kind < 0.23:
        return value(rng)
    return f"{key}={given}"
