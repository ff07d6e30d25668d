"""Export a checkpoint (Engine.save_load.ckpt_dir) of any plan as a program that generates by itself."""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Export to ``Engine.save_load.output_dir``."""
    from ppfleetx.deploy.export import run as run_program

    run_program(args.config, args.override)
