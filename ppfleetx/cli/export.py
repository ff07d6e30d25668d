"""Export a checkpoint of any plan as a program that generates by itself."""

from __future__ import annotations

import argparse

from ppfleetx.cli.model_arguments import add_model_arguments, job_of

EXAMPLES = """\
examples:
  ppfleetx export output --output exported
  ppfleetx infer exported "Once upon a time"
"""
INTERMIXED = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_model_arguments(parser)
    parser.add_argument(
        "--output", metavar="DIR", help="where the export is written (Engine.save_load.output_dir)"
    )


def run(args: argparse.Namespace) -> None:
    """Export to ``Engine.save_load.output_dir``."""
    from ppfleetx.commands.export import run as run_program
    from ppfleetx.commands.resolve_model import override

    more = [] if args.output is None else [override("Engine.save_load.output_dir", args.output, "--output")]
    with job_of(args, *more) as job:
        run_program(job.config, job.overrides)
