#!/usr/bin/env python3
"""Export a checkpoint (Engine.save_load.ckpt_dir) of any plan as a program that generates by itself.

The same as `ppfleetx export`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("export")
