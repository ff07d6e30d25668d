"""Continue prompts (Generation.prompt or .prompt_file) with a checkpoint (Engine.save_load.ckpt_dir)."""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="also write prompts and results as jsonl")


def run(args: argparse.Namespace) -> None:
    """Generate; results go to standard output."""
    from ppfleetx.core.programs.generate import run as run_program

    run_program(args.config, args.override, args.output)
