"""Implement ``ppfleetx configs``, which lists and copies configurations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppfleetx.commands.options import Command, positional
from ppfleetx.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Configs(Command):
    """List the configurations that ship with ppfleetx, or copy one to edit.

    Other verbs accept these names after -c; the prefix `gpt/` may be left out.
    """

    examples = """\
examples:
  ppfleetx configs
  ppfleetx configs copy gpt/pretrain_gpt_345M_single_card my_configs
  ppfleetx train -c gpt/pretrain_gpt_345M_single_card -o Engine.max_steps=100
"""
    words: tuple[str, ...] = positional(
        "copy NAME DIR", "copy a configuration and its bases; nothing is overwritten", default=()
    )

    def run(self) -> None:
        if not self.words:
            print(table())
            return
        if len(self.words) != 3 or self.words[0] != "copy":
            raise ConfigError("expected no arguments, or: copy NAME DIR")
        from ppfleetx.config.shipped import copy_config

        written = copy_config(self.words[1], Path(self.words[2]))
        print(f"copied: {', '.join(map(str, written))}" if written else f"already there: {self.words[2]}")


def table() -> str:
    """Return a table of the shipped configurations: name, number of parameters, number of cards, purpose."""
    from ppfleetx.commands.check import human_count
    from ppfleetx.config.loader import load_config
    from ppfleetx.config.shipped import purpose, shipped_configs
    from ppfleetx.models.gpt.spec import parameter_count

    rows = [("NAME", "SIZE", "CARDS", "PURPOSE")]
    for name, path in shipped_configs().items():
        cfg = load_config(path)
        cards = str(cfg.plan.world_size)
        if "Distributed.dp_degree" in cfg.derived:  # dp_degree follows the number of processes
            cards = "any" if cards == "1" else f"{cards} x n"
        rows.append((name, human_count(parameter_count(cfg.Model)), cards, purpose(path)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    return "\n".join(lines)
