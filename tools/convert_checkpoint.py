#!/usr/bin/env python3
"""Convert checkpoints of ppfleetx, Hugging Face, GGUF, FleetX or Megatron-LM to one of the first three.

The same as `ppfleetx convert`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("convert")
