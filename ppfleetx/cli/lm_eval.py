"""Measure a checkpoint (Engine.save_load.ckpt_dir) on tasks of lm-evaluation-harness (docs/evaluation.md)."""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser)
    add = parser.add_argument
    add("--tasks", required=True, metavar="NAME[,NAME...]", help="tasks or groups of the harness")
    add("--batch-size", type=int, default=8, metavar="N", help="texts per forward pass (8)")
    add("--num-fewshot", type=int, metavar="N", help="examples in each prompt (what the task says)")
    add("--limit", type=int, metavar="N", help="only so many examples of each task")
    add("--include-path", metavar="DIR", help="directory with further task definitions")
    add("--output", metavar="FILE", help="also write the results as JSON")


def run(args: argparse.Namespace) -> None:
    """Run the harness and print its table."""
    from ppfleetx.core.programs.lm_eval import run as run_program

    run_program(
        args.config,
        args.override,
        args.tasks.split(","),
        batch_size=args.batch_size,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        include_path=args.include_path,
        output=args.output,
    )
