"""Evaluate a checkpoint (Engine.save_load.ckpt_dir).

With a pretraining configuration: token-weighted loss and perplexity on Data.Eval. With Model.module:
GPTEvalModule: perplexity of a text file, or accuracy of last words (Offline_Eval, docs/evaluation.md).
"""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Evaluate and print the result."""
    from ppfleetx.core.programs.evaluate import run as run_program

    run_program(args.config, args.override)
