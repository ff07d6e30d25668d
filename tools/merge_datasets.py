#!/usr/bin/env python3
"""Merge several .bin/.idx corpora into one: the same as `ppfleetx merge-data`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("merge-data")
