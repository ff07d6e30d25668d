#!/usr/bin/env python3
"""Continue prompts (Generation.prompt or .prompt_file) with a checkpoint (Engine.save_load.ckpt_dir)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.utils.cli import add_config_arguments, run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="also write prompts and results as jsonl")
    args = parser.parse_args()

    from ppfleetx.core.programs.generate import run

    run(args.config, args.override, args.output)


if __name__ == "__main__":
    run_tool(main)
