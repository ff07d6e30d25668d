#!/usr/bin/env python3
"""Pretrain a GPT as Megatron's arguments say (docs/dialects/megatron.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.commands.main import run_function

if __name__ == "__main__":
    run_function("megatron_programs:run", sys.argv[1:])
