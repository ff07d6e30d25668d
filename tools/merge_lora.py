#!/usr/bin/env python3
"""Add the adapters of a checkpoint trained with Model.lora to its weights: a plain checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppfleetx.utils.cli import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, metavar="DIR", help="checkpoint with adapters")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new or empty directory")
    parser.add_argument(
        "--base", metavar="DIR", help="the frozen weights, for adapters saved alone (Model.lora.base)"
    )
    args = parser.parse_args()

    from ppfleetx.checkpoint.foreign.merge_lora import merge_lora
    from ppfleetx.utils.log import configure_logging

    configure_logging()
    print(f"written: {merge_lora(args.input, args.output, args.base)}")


if __name__ == "__main__":
    run_tool(main)
