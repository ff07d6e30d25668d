#!/usr/bin/env python3
"""Evaluate a checkpoint (Engine.save_load.ckpt_dir).

With a pretraining configuration: token-weighted loss and perplexity on Data.Eval. With Model.module:
GPTEvalModule: perplexity of a text file, or accuracy of last words (Offline_Eval, docs/evaluation.md).
"""

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

    from ppfleetx.core.programs.evaluate import run

    run(args.config, args.override)


if __name__ == "__main__":
    run_tool(main)
