#!/usr/bin/env python3
"""Export a checkpoint as a stand-alone program that generates text: the same as `ppfleetx export`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("export")
