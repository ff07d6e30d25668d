"""Serve a checkpoint (Engine.save_load.ckpt_dir) over HTTP, as OpenAI's completions interface does."""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Serve until told to stop."""
    from ppfleetx.deploy.server.run import run as run_program

    run_program(args.config, args.override)
