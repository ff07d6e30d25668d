#!/usr/bin/env python3
"""Print the configuration of another toolkit as one of ppfleetx: the same as `ppfleetx translate`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("translate")
