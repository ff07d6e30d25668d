"""Look at everything a job needs before it starts: a table of what is well, what fails, and its cure.

Alone it looks at this machine: libraries, variables, Paddle, its kernels, the GPU. With -c it looks at what
that configuration needs as well. Exit code 1 when something failed, else 0.
"""

from __future__ import annotations

import argparse
import os

from ppfleetx.utils.cli import add_config_arguments

EXAMPLES = """\
examples:
  ppfleetx doctor
  ppfleetx doctor -c FILE -o Engine.save_load.output_dir=output
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Examine, print, and give the exit code."""
    from ppfleetx.config.loader import load_config
    from ppfleetx.core.programs.launch import world_size
    from ppfleetx.doctor.case import Case
    from ppfleetx.doctor.report import as_json, as_table, exit_code, joined
    from ppfleetx.doctor.run import examine_all
    from ppfleetx.utils.devices import expected_device

    size = world_size(os.environ)
    cfg = None if args.config is None else load_config(args.config, args.override, world_size=size)
    case = Case(cfg, expected_device("auto" if cfg is None else cfg.Global.device))
    rows = joined([examine_all(case)])
    print((as_json if args.json else as_table)(rows, size))
    return exit_code(rows)
