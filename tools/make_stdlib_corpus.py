#!/usr/bin/env python3
"""Write the sources of Python as a corpus of JSON lines: the same as `ppfleetx stdlib-corpus`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("stdlib-corpus")
