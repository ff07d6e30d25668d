"""What FleetX's configurations ask for and this program leaves out, refused by the name of the feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.tree import Node, plain_value

_OTHER_MODELS = ("Ernie", "GeneralCls", "Imagen", "MOCO", "Bert", "Debertav2", "T5", "CLIP", "Protein", "VIS")


def _is_automatic(value: Any) -> bool:
    return isinstance(value, str) and value.endswith("Auto")


def _is_other_model(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_OTHER_MODELS)


_LEFT_OUT: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "Model.module",
        _is_other_model,
        "this program has GPT models only; use FleetX for its other models",
    ),
    (
        "Model.module",
        _is_automatic,
        "this program has no automatic parallel mode (FleetX's tools/auto.py), in which Paddle cuts up a "
        "static program; take the module of this name without Auto, and choose the degrees in Distributed",
    ),
    (
        "Model.name",
        lambda value: value == "GPT-cn",
        "this program does not read the tokenizer of FleetX's Chinese GPT (PaddleNLP's GPTChineseTokenizer); "
        "the network is that of Model.name: GPT, which trains on corpora of its token ids",
    ),
)


def refuse_left_out(tree: Node) -> None:
    """Raise ConfigError when ``tree`` asks for a feature of FleetX that is not here."""
    for key, applies, rule in _LEFT_OUT:
        node: Node | None = tree
        for part in key.split("."):
            node = node.value.get(part) if node is not None and isinstance(node.value, dict) else None
        if node is not None and applies(plain_value(node)):
            raise ConfigError(rule, key=key, value=plain_value(node), place=node.place)
