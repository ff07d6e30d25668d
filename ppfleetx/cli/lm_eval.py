"""Measure a checkpoint on tasks of lm-evaluation-harness (docs/evaluation.md)."""

from __future__ import annotations

import argparse

from ppfleetx.cli.model_arguments import add_model_arguments, job_of

INTERMIXED = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--tasks", required=True, metavar="NAME[,NAME...]", help="tasks or groups of the harness")
    add("--batch-size", type=int, default=8, metavar="N", help="texts per forward pass (8)")
    add("--num-fewshot", type=int, metavar="N", help="examples in each prompt (what the task says)")
    add("--limit", type=int, metavar="N", help="only so many examples of each task")
    add("--include-path", metavar="DIR", help="directory with further task definitions")
    add("--output", metavar="FILE", help="also write the results as JSON")


def run(args: argparse.Namespace) -> None:
    """Run the harness and print its table."""
    from ppfleetx.commands.lm_eval import run as run_program

    with job_of(args) as job:
        run_program(
            job.config,
            job.overrides,
            args.tasks.split(","),
            batch_size=args.batch_size,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            include_path=args.include_path,
            output=args.output,
        )
