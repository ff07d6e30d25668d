#!/usr/bin/env python3
"""Continue prompts (Generation.prompt or .prompt_file) with an exported model (Inference.model_dir).

The same as `ppfleetx infer` and tools/inference.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("infer")
