#!/usr/bin/env python3
"""Train GPT-2 in one of five sizes on eight devices: train_full_8p.sh and train_performance_8p.sh."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ppfleetx.commands.main import run_function

if __name__ == "__main__":
    run_function("megatron_programs:run_gpt2", sys.argv[2:], evaluates=sys.argv[1] == "full")
