#!/usr/bin/env python3
"""Measure a checkpoint (Engine.save_load.ckpt_dir) on tasks of lm-evaluation-harness (docs/evaluation.md).

The same as `ppfleetx lm-eval`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("lm-eval")
