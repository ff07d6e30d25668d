"""Serve a checkpoint over HTTP, as OpenAI's completions interface does, with a page to try it."""

from __future__ import annotations

import argparse

from ppfleetx.cli.model_arguments import add_model_arguments, job_of

EXAMPLES = """\
examples:
  ppfleetx serve output
  ppfleetx serve output --port 9000 -o Generation.max_dec_len=200
"""
INTERMIXED = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_model_arguments(parser)
    parser.add_argument("--port", type=int, metavar="N", help="port of the server (Serve.port)")


def run(args: argparse.Namespace) -> None:
    """Serve until told to stop."""
    from ppfleetx.commands.resolve_model import override
    from ppfleetx.commands.serve import run as run_program

    port = [] if args.port is None else [override("Serve.port", args.port, "--port")]
    with job_of(args, *port) as job:
        run_program(job.config, job.overrides)
