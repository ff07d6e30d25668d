"""List the configurations that ship with ppfleetx, or copy one to change it.

-c takes the names as they are listed here; `gpt/` may be left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = """\
examples:
  ppfleetx configs
  ppfleetx configs copy gpt/pretrain_gpt_345M_single_card my_configs
  ppfleetx train -c gpt/pretrain_gpt_345M_single_card -o Engine.max_steps=100
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    actions = parser.add_subparsers(dest="action", metavar="copy NAME DIR")
    copy = actions.add_parser("copy", help="copy a configuration and its bases; nothing is overwritten")
    copy.add_argument("name", metavar="NAME", help="as it is listed")
    copy.add_argument("directory", metavar="DIR", type=Path, help="made if it is not there")


def run(args: argparse.Namespace) -> None:
    """Print the table, or copy."""
    if args.action == "copy":
        from ppfleetx.config.shipped import copy_config

        written = copy_config(args.name, args.directory)
        print(f"copied: {', '.join(map(str, written))}")
        return
    print(table())


def table() -> str:
    """Name, parameters, cards and purpose of each."""
    from ppfleetx.commands.check import human_count
    from ppfleetx.config.loader import load_config
    from ppfleetx.config.shipped import purpose, shipped_configs
    from ppfleetx.models.gpt.spec import parameter_count

    rows = [("NAME", "SIZE", "CARDS", "PURPOSE")]
    for name, path in shipped_configs().items():
        cfg = load_config(path)
        cards = str(cfg.plan.world_size)
        if "Distributed.dp_degree" in cfg.derived:  # as many replicas as are started
            cards = "any" if cards == "1" else f"{cards} x n"
        rows.append((name, human_count(parameter_count(cfg.Model)), cards, purpose(path)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    return "\n".join(lines)
