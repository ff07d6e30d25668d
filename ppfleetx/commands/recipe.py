"""The verb ``recipe``: a whole configuration from the depth of the model."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass
from pathlib import Path

from ppfleetx.commands.options import Command, option, whole_number
from ppfleetx.config.errors import ConfigError
from ppfleetx.planner.recipe import Dial, recipe
from ppfleetx.utils.files import atomic_write, refuse_as_new_file


@dataclass(frozen=True, kw_only=True)
class Recipe(Command):
    """Write a whole configuration from the depth of the model.

    Shape, batch, learning rate and length follow from the depth, and the planner chooses the plan. The
    predicted time, memory and cost are the first lines of the file. docs/planner.md has the rules.
    """

    examples = """\
examples:
  ppfleetx recipe --depth 12 --cards 8xA100-80GB --write d12.yaml
  ppfleetx recipe --depth 4 --cards 2xCPU --tokens-per-param 5 --seq-len 256 --vocab-size 8192
"""
    depth: int = option("layers; the model is 64 times as wide", default=MISSING, type=whole_number)
    cards: str = option(
        "how many cards of which kind, a name or a YAML file as for `ppfleetx plan` (default: 8xA100-80GB)",
        default="8xA100-80GB",
        metavar="NxCARD",
    )
    per_node: int = option("cards per node (default: 8)", default=8, type=whole_number)
    tokens_per_param: float = option(
        "training tokens for each parameter (default: 20)", default=20.0, metavar="T"
    )
    seq_len: int = option("tokens of a sequence (default: 2048)", default=2048, type=whole_number)
    vocab_size: int = option("tokens of the vocabulary (default: 32768)", default=32768, type=whole_number)
    price: float | None = option("price of a card-hour, for the cost", metavar="P")
    write: str | None = option("file to write; without it the configuration is printed", metavar="FILE")

    def run(self) -> None:
        """Print the configuration, or write it and print its prediction."""
        for key in ("tokens_per_param", "price"):
            value = getattr(self, key)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError("must be greater than 0", key=f"--{key.replace('_', '-')}", value=value)
        if self.write is not None:
            refuse_as_new_file(Path(self.write), "--write")
        found = recipe(self._dial(), self.per_node)
        if self.write is None:
            print(found.yaml(self.price), end="")
            return
        with atomic_write(self.write, "w") as file:
            file.write(found.yaml(self.price))
        print("\n".join([*found.summary(self.price), f"written: {self.write}"]))

    def _dial(self) -> Dial:
        form = re.fullmatch(r"([1-9][0-9]{0,5})x(.+)", self.cards)
        if form is None:
            raise ConfigError("must be like 8xA100-80GB", key="--cards", value=self.cards)
        return Dial(self.depth, int(form[1]), form[2], self.tokens_per_param, self.seq_len, self.vocab_size)
