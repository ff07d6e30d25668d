"""Refuse configurations of other toolkits, and suggest our keys for theirs.

The known toolkits are Megatron-LM, NeMo, DeepSpeed, Transformers, PaddleNLP, MindFormers and nanoGPT. Nothing
is translated here; ``ppfleetx translate`` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.tree import Node

_ENOUGH = 2  # keys of our own that other toolkits also use
_MAX_SHOWN = 12
_ADVICE = (
    "ppfleetx translate FILE --to OURS.yaml rewrites files of Megatron-LM, MindSpeed, MindFormers and "
    "PaddleFormers (docs/other_toolkits.md); ppfleetx convert --from hf makes a checkpoint and its "
    "configuration of Hugging Face's."
)


def refuse_foreign(tree: Node, sections: frozenset[str]) -> None:
    """Raise ConfigError if ``tree`` has keys of other toolkits and none of our sections."""
    if not sections.isdisjoint(tree.value):
        return
    known = {key: ours for key in _all_keys(tree) if (ours := our_key(key)) is not None}
    if len(known) < _ENOUGH:
        return
    shown = [f"\n  {key} is {ours}" for key, ours in list(known.items())[:_MAX_SHOWN]]
    raise ConfigError(
        "this is another toolkit's configuration: it has no section of this program, such as Model.",
        place=tree.place,
        hint=f"{_ADVICE} Here{''.join(shown)}",
    )


def _all_keys(tree: Node) -> Iterator[str]:
    for key, node in tree.value.items():
        yield key
        if isinstance(node.value, dict):
            yield from _all_keys(node)


@cache
def names_of_others() -> dict[str, str]:
    """Our key for each name of another toolkit."""
    text = Path(__file__).with_name("foreign_names.yaml").read_text("utf-8")
    return {name: key for key, names in yaml.safe_load(text).items() for name in names.split()}


def our_key(name: str) -> str | None:
    """Our key for another toolkit's ``name``, also in the form ``--Tensor-Parallel-Size``; None if
    unknown.
    """
    return names_of_others().get(name.strip("-").replace("-", "_").lower())
