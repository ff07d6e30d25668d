"""Look at a configuration without running it: the plan, parameters, batch arithmetic, token ids.

Needs no Paddle. Exit code 2 when a run with it would be refused, with the reason.
"""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_config_arguments

EXAMPLES = """\
example:
  ppfleetx check -c FILE -o Distributed.mp_degree=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print the report."""
    from ppfleetx.commands.check import check_report
    from ppfleetx.config.loader import load_config
    from ppfleetx.core.engine.run_directory import check_beginning
    from ppfleetx.data.token_ids import token_id_lines

    cfg = load_config(args.config, args.override)
    report = check_report(cfg)
    if cfg.Data.Train is not None:
        check_beginning(cfg)
    token_ids = token_id_lines(cfg)
    print("\n".join([report, *token_ids]))  # it says that all is well, so nothing may be refused behind it
