#!/usr/bin/env python3
"""Compare the loss sequences of two runs: two plans, two commits, or two existing runs.

The same as `ppfleetx compare`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("compare")
