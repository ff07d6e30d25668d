#!/usr/bin/env python3
"""Measure a checkpoint (Engine.save_load.ckpt_dir) on tasks of lm-evaluation-harness (docs/evaluation.md)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.utils.cli import add_config_arguments, run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    add = parser.add_argument
    add("--tasks", required=True, metavar="NAME[,NAME...]", help="tasks or groups of the harness")
    add("--batch-size", type=int, default=8, metavar="N", help="texts per forward pass (8)")
    add("--num-fewshot", type=int, metavar="N", help="examples in each prompt (what the task says)")
    add("--limit", type=int, metavar="N", help="only so many examples of each task")
    add("--include-path", metavar="DIR", help="directory with further task definitions")
    add("--output", metavar="FILE", help="also write the results as JSON")
    args = parser.parse_args()

    from ppfleetx.core.programs.lm_eval import run

    run(
        args.config,
        args.override,
        args.tasks.split(","),
        batch_size=args.batch_size,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        include_path=args.include_path,
        output=args.output,
    )


if __name__ == "__main__":
    run_tool(main)
