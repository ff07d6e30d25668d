"""Options as dataclasses, and the typed values that they give to keys of the configuration."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from ppfleetx.commands.options import Command, option, positional, repeated, switch
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.reading.overrides import Setting
from ppfleetx.config.reading.parse import Sections

SECTIONS = Sections(
    {
        "Global": {"local_batch_size": 1},
        "Model": {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4},
    },
    "argument config",
)


@dataclass(frozen=True, kw_only=True)
class Example(Command):
    """An example."""

    intermixed = True

    place: Path = positional("PLACE", "where", default=MISSING)
    words: tuple[str, ...] = positional("WORD", "said", default=(), key="Generation.prompt")
    kind: Literal["a", "b"] | None = option("of what kind")
    count: int = option("how many", default=3, key="Serve.port")
    two_numbers: tuple[int, int] | None = option("a pair", "--pair")
    many: tuple[int, ...] = option("several", default=())
    each: tuple[str, ...] = repeated("one at a time", metavar="X")
    is_on: bool = switch("on")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x", {}),
        ("x --is-on y z", {"is_on": True, "words": ("y", "z")}),
        ("x --kind b --count 5", {"kind": "b", "count": 5}),
        ("x --pair 1 2 --many 3 4", {"two_numbers": (1, 2), "many": (3, 4)}),
        ("x --each y --each z", {"each": ("y", "z")}),
    ],
)
def test_types_say_what_is_read(line: str, expected: dict[str, Any]) -> None:
    assert Example.parse(line.split()) == Example(place=Path("x"), **expected)


@pytest.mark.parametrize("line", ["", "x --kind c", "x --count y", "x --pair 1", "x --other"])
def test_wrong_lines_end_with_the_usage(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        Example.parse(line.split())
    assert ended.value.code == 2


def test_options_give_values_to_keys() -> None:
    assert Example(place=Path("x"), words=("y",), count=7).settings() == [
        Setting("Generation.prompt", ("y",), "WORD"),
        Setting("Serve.port", 7, "--count"),
    ]


@pytest.mark.parametrize(
    "value", ["a: b", "# no comment", "x=y", "'\"", "null", "7", "café \U0001f600", "a\nb", "[", "%a"]
)
def test_a_typed_text_stays_as_it_is(value: str) -> None:
    cfg = load_config(SECTIONS, [Setting("Generation.prompt", [value], "PROMPT")])
    assert cfg.Generation.prompt == (value,)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (Setting("Serve.port", "x", "--port"), "Serve.port = 'x' (--port): must be"),
        (Setting("Serve.prot", 1, "--port"), "Serve.prot (--port): there is no such key"),
        (Setting("Serve", object(), "overrides"), "Serve (overrides): a configuration holds no object"),
        (Setting("Global.local_batch_size", 0, "config"), "Global.local_batch_size = 0 (config)"),
    ],
)
def test_an_error_names_what_gave_the_value(setting: Setting, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SECTIONS, [setting])
    assert said in str(caught.value)


def test_two_values_for_one_key_contradict_each_other() -> None:
    port = Setting("Serve.port", 9000, "--port")
    assert load_config(SECTIONS, [port, "Serve.port=9000"]).Serve.port == 9000
    with pytest.raises(ConfigError, match=r"Serve.port = 1 \(-o override 1\): is already set by --port"):
        load_config(SECTIONS, [port, "Serve.port=1"])
