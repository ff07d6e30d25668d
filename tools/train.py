#!/usr/bin/env python3
"""Pretrain or finetune the model of a YAML configuration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppfleetx.utils.cli import add_config_arguments, run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="validate the configuration, print plan, parameters and batch arithmetic, and exit",
    )
    args = parser.parse_args()
    if args.check:
        from ppfleetx.config.loader import load_config
        from ppfleetx.core.engine.run_directory import check_beginning
        from ppfleetx.core.programs.check import check_report
        from ppfleetx.core.programs.token_ids import token_id_lines

        cfg = load_config(args.config, args.override)
        print(check_report(cfg))
        if cfg.Data.Train is not None:
            check_beginning(cfg)
        for line in token_id_lines(cfg):
            print(line)
        return
    from ppfleetx.core.programs.launch import start_process

    cfg, ctx = start_process(args.config, args.override, reads=("Train", "Eval"))
    from ppfleetx.core.programs.train import train

    train(cfg, ctx)


if __name__ == "__main__":
    run_tool(main)
