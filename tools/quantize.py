#!/usr/bin/env python3
"""Store the weights of a checkpoint in 8 or 4 bits: the same as `ppfleetx quantize`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("quantize")
