#!/usr/bin/env python3
"""Continue prompts (Generation.prompt or .prompt_file) with an exported model (Inference.model_dir)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppfleetx.utils.cli import add_config_arguments, run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="also write prompts and results as jsonl")
    args = parser.parse_args()

    from ppfleetx.deploy.inference import run

    run(args.config, args.override, args.output)


if __name__ == "__main__":
    run_tool(main)
