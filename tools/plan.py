#!/usr/bin/env python3
"""Predict memory and step time of plans, or rank them: the same as `ppfleetx plan`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("plan")
