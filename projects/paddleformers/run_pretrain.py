#!/usr/bin/env python3
"""Pretrain as a configuration of PaddleNLP or PaddleFormers says (docs/dialects/paddleformers.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.utils.exit_codes import run_tool


def main() -> None:
    from ppfleetx.commands.megatron_programs import run_paddleformers

    run_paddleformers(sys.argv[1:])


if __name__ == "__main__":
    run_tool(main)
