#!/usr/bin/env python3
"""Pretrain as a configuration of PaddleNLP or PaddleFormers says (docs/dialects/paddleformers.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.commands.main import run_function

if __name__ == "__main__":
    run_function("paddleformers_programs:run", sys.argv[1:])
