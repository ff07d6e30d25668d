"""What can be wrong with a configuration: changes of its text, and overrides that nobody should write."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from ppfleetx.config.field_types import all_keys, field_types, members, section_in
from ppfleetx.config.registry import Registered
from ppfleetx.config.sections.root import RunConfig

_KEY = re.compile(rb"^(\s*)([A-Za-z_0-9]+):", re.MULTILINE)
_VALUE = re.compile(rb"^(\s*[A-Za-z_0-9]+: )(\S.*)$", re.MULTILINE)

_PLAUSIBLE = """
    0 1 2 3 4 5 6 8 12 16 24 64 100 128 512 1000 1024 4096 65536 1000000 0.0 0.1 0.5 1.0 2.0 1e-5 1e-3 true
    false null auto cpu gpu step epoch loss metric O1 O2 float16 bfloat16 full full_attn core_attn cosine
    linear wsd constant rope none learned_absolute swiglu gelu relu RMSNorm LayerNorm GPTModule GPTEvalModule
    GPTFinetuneModule GPTGenerationModule SST2 STSB MNLI PromptResponseDataset GPTDataset train dev
    beam_search greedy_search sampling [1,1] [2,2] [12,12] [6,6,6,6] [0,1] [969,30,1] [a,b] ./data x
"""
_ODD = """
    ~ yes off -1 -7 1.5 -0.5 .5 5. -1e-5 1e999 .inf -.INF .nan 007 0x10 1_000 2147483647 2147483648 4294967296
    9223372036854775807 9223372036854775808 -9223372036854775809 1000000000000 3000000 720720 1048576 1000003
    None None. nan inf '' '~' [] {} [[]] [{}] [1] [-1] [0,0,0] [null] [true] {a:1} {a:{b:[c]}} {1:2} {'':1}
    [[1,2],[3]] [1e308,1e308] '12' '1e-3' abc *x &x &x-1 !!int !!python/object:os.system !!binary [ ] { } ] }
    : , - ? | > ' % @ ` # 2022-01-01 12:30 /dev/zero /dev/null pipe / . .. ~root ${HOME} %s \\x00 GPT-cn
    MoEModule GPTGenerationModuleAuto o2 ² ١٢ é 数据 \u200b \ufeff \u202e 🙂 e\u0301
"""
PLAUSIBLE, ODD = _PLAUSIBLE.split(), _ODD.split()


def _long_values(rng: random.Random) -> str:
    size = rng.choice((65, 300, 4301))
    return rng.choice(
        (
            "9" * size,
            "-" + "9" * size,
            "0." + "1" * size,
            "a" * size,
            "'" + "é" * size + "'",
            "[" + "1, " * size + "]",
            "[" + "x, " * size + "]",
            "{" + ", ".join(f"k{i}: {i}" for i in range(size)) + "}",
            "1" + "_1" * size,
            "1," * size + "x",
            "*" + "a" * size,
            '"' + "\\u00e9" * size + '"',
        )
    )


def value(rng: random.Random) -> str:
    """Text of a value: one that is right somewhere, or hardly anywhere."""
    kind = rng.random()
    if kind < 0.06:
        return _long_values(rng)
    if kind < 0.1:
        return "".join(rng.choice(string.printable) for _ in range(rng.randrange(1, 30)))
    if kind < 0.2:
        return str(rng.choice((1, -1)) * rng.randrange(10 ** rng.randrange(1, 25)))
    return rng.choice(ODD if kind < 0.5 else PLAUSIBLE)


def fitting_value(key: str, rng: random.Random) -> str:
    """Text of a value of the type that the key of the schema has."""
    annotation: Any = RunConfig
    for part in key.split("."):
        annotation = field_types(section_in(annotation))[part]
    return _fitting(annotation, rng)


def _fitting(annotation: Any, rng: random.Random) -> str:
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


def _typo(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word)) if word else 0
    letter = rng.choice(string.ascii_letters + string.digits + "_-. \t'\"é²\u200b")
    return rng.choice(
        (
            word[:at] + word[at + 1 :],
            word[:at] + letter + word[at:],
            word[:at] + letter + word[at + 1 :],
            word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :],
            word.upper(),
            word * 2,
            word * 40,
            letter,
            "",
        )
    )


def _change_key(text: bytes, rng: random.Random) -> bytes:
    found = list(_KEY.finditer(text))
    if not found:
        return text
    match = rng.choice(found)
    new = _typo(match[2].decode(), rng)
    if rng.random() < 0.2:
        new = rng.choice(found)[2].decode()  # of another place
    if rng.random() < 0.1:
        new = rng.choice(
            ("tensor_parallel_degree", "num_hidden_layers", "<<", "_base_", "_inherited_", "? a")
        )
    return text[: match.start(2)] + new.encode("utf-8", "surrogatepass") + text[match.end(2) :]


def _change_value(text: bytes, rng: random.Random) -> bytes:
    found = list(_VALUE.finditer(text))
    if not found:
        return text
    match = rng.choice(found)
    return text[: match.start(2)] + value(rng).encode("utf-8", "surrogatepass") + text[match.end(2) :]


def _some_value(key: str, rng: random.Random) -> str:
    return fitting_value(key, rng) if rng.random() < 0.6 else value(rng)


def _add_value(text: bytes, rng: random.Random) -> bytes:
    """A key of the schema that the file does not have, or has elsewhere."""
    key = rng.choice(all_keys(RunConfig))
    *sections, name = key.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    lines.append(f"{'  ' * len(sections)}{name}: {_some_value(key, rng)}")
    return _merged(text, lines)


def _merged(text: bytes, lines: Sequence[str]) -> bytes:
    """``lines`` below the section of ``text`` that has the name of the first, or at the end."""
    head = re.search(rb"^" + re.escape(lines[0].encode()) + rb" *$", text, re.MULTILINE)
    added = "\n".join(lines[1:] if head else lines).encode("utf-8", "surrogatepass")
    if head is None:
        return text + b"\n" + added + b"\n"
    return text[: head.end()] + b"\n" + added + text[head.end() :]


def _change_lines(text: bytes, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(8)
    if kind == 0:
        del lines[one]
    elif kind == 1:
        lines.insert(other, lines[one])
    elif kind == 2:
        lines[one], lines[other] = lines[other], lines[one]
    elif kind == 3:
        lines[one] = b"  " * rng.randrange(1, 5) + lines[one]
    elif kind == 4:
        lines[one] = lines[one].lstrip()
    elif kind == 5:
        lines[one] = lines[one] * rng.choice((2, 50))
    elif kind == 6:
        del lines[min(one, other) : max(one, other)]
    else:
        lines.insert(
            one, rng.choice((b"---\n", b"...\n", b"\t\n", b"%TAG !a! b\n", b"!!set\n", b"? \n", b"- 1\n"))
        )
    return b"".join(lines)


def _add_keys(text: bytes, rng: random.Random) -> bytes:
    count = rng.choice((1, 20, 2000))
    indent = rng.choice(("", "  ", "    "))
    keys = "".join(f"{indent}k{i}: {i}\n" for i in range(count))
    lines = text.splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), keys.encode())
    return b"".join(lines)


def _change_base(text: bytes, rng: random.Random) -> bytes:
    base = rng.choice(
        (
            "mutated.yaml",
            "/dev/urandom",
            "../../../pipe",
            ".",
            "''",
            "nowhere.yaml",
            "x" * 300,
            "{a: b}",
            "[[a]]",
            "5",
            '"\\0"',
        )
    )
    return re.sub(rb"^_base_:.*\n", b"", text, flags=re.MULTILINE) + f"\n_base_: {base}\n".encode()


def _change_bytes(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text) + 1)
    kind = rng.randrange(6)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + rng.randbytes(rng.choice((1, 3, 100))) + text[at:]
    if kind == 2:
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    if kind == 3:
        return text[at:] + text[:at]
    if kind == 4:
        strange = rng.choice(
            ("\ufeff", "\u200b", "\u202e", "\u2028", "\x85", "\xa0", "²", "🙂", "\ud800", "\0", "\x1b")
        )
        return text[:at] + strange.encode("utf-8", "surrogatepass") + text[at:]
    return text.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))


def _nest(text: bytes, rng: random.Random) -> bytes:
    depth = rng.choice((1, 3, 50))
    lines = text.splitlines(keepends=True)
    head = b"".join(
        b"  " * level + rng.choice((b"Model", b"Engine", b"a")) + b":\n" for level in range(depth)
    )
    return head + b"".join(b"  " * depth + line for line in lines)


def _add_aliases(text: bytes, rng: random.Random) -> bytes:
    found = list(_VALUE.finditer(text))
    if len(found) < 2:
        return text
    first, second = sorted(rng.sample(found, 2), key=lambda match: match.start())
    middle = text[first.end(2) : second.start(2)]
    start = text[: first.start(2)] + b"&x " + text[first.start(2) : first.end(2)]
    return start + middle + rng.choice((b"*x", b"[*x, *x]", b"{a: *x}", b"*y")) + text[second.end(2) :]


_MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *[_change_key] * 2,
    *[_change_value] * 6,
    *[_add_value] * 4,
    *[_change_lines] * 2,
    *[_change_bytes] * 2,
    _add_keys,
    _change_base,
    _nest,
    _add_aliases,
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
    key = rng.choice(all_keys(RunConfig))
    given = _some_value(key, rng)
    kind = rng.random()
    if kind < 0.12:
        parts = key.split(".")
        at = rng.randrange(len(parts))
        parts[at] = _typo(parts[at], rng)
        key = ".".join(parts)
    elif kind < 0.2:
        key += rng.choice((".0", ".1", ".²", ".x", ".-1", ".99999999999", ".a.b.c", "..."))
    elif kind < 0.23:
        return value(rng)
    elif kind < 0.26:
        key = _typo(key, rng)
    return f"{key}={given}"
