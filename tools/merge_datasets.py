#!/usr/bin/env python3
"""Write several .bin/.idx corpora as one, in the order given (a directory: all its corpora, by name).

The same as `ppfleetx merge-data`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("merge-data")
