#!/usr/bin/env python3
"""Write a corpus preprocessed by FleetX as a .bin/.idx pair: the same as `ppfleetx convert-data`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("convert-data")
