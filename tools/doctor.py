#!/usr/bin/env python3
"""Check everything that a job needs before it starts.

The same as `ppfleetx doctor`; the program is `ppfleetx/commands/doctor.py`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("doctor")
