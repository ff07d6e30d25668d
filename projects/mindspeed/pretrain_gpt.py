#!/usr/bin/env python3
"""Pretrain a GPT as a YAML file of MindSpeed-Core-MS says (docs/dialects/mindspeed.md)."""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve()
sys.path.insert(0, str(_HERE.parents[2]))

from ppfleetx.commands.main import run_function

if __name__ == "__main__":
    run_function("mindspeed_programs:run", sys.argv[1:], _HERE.with_name("pretrain_gpt_38BV3.yaml"))
