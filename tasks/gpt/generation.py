#!/usr/bin/env python3
"""Continue prompts (Generation.prompt or .prompt_file) with a checkpoint (Engine.save_load.ckpt_dir).

The same as `ppfleetx generate`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.commands.main import run_program

if __name__ == "__main__":
    run_program("generate")
