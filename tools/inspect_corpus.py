#!/usr/bin/env python3
"""Show the contents of a tokenized corpus, compare it with its checksums, or write checksums for it.

The same as `ppfleetx inspect-data`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("inspect-data")
