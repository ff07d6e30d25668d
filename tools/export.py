#!/usr/bin/env python3
"""Export a checkpoint (Engine.save_load.ckpt_dir) of any plan as a program that generates by itself."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppfleetx.utils.cli import add_config_arguments, run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    args = parser.parse_args()

    from ppfleetx.deploy.export import run

    run(args.config, args.override)


if __name__ == "__main__":
    run_tool(main)
