#!/usr/bin/env python3
"""Evaluate a checkpoint (Engine.save_load.ckpt_dir) on Data.Eval: token-weighted loss and perplexity."""

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

    from ppfleetx.core.launch import start_process

    cfg, ctx = start_process(args.config, args.override, reads=("Eval",))
    from ppfleetx.core.engine.build import evaluate

    evaluate(cfg, ctx)


if __name__ == "__main__":
    run_tool(main)
