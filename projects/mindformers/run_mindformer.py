#!/usr/bin/env python3
"""Train, finetune, evaluate or predict as a MindFormers configuration says (docs/dialects/mindformers.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.commands.main import run_function

if __name__ == "__main__":
    run_function("mindformers_programs:run", sys.argv[1:])
