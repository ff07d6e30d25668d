#!/usr/bin/env python3
"""Evaluate a checkpoint (Engine.save_load.ckpt_dir): the same as `ppfleetx eval`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("eval")
