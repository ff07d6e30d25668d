#!/usr/bin/env python3
"""Pretrain a GPT as a YAML file of MindSpeed-Core-MS says (docs/dialects/mindspeed.md)."""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve()
sys.path.insert(0, str(_HERE.parents[2]))

from ppfleetx.utils.exit_codes import run_tool


def main() -> None:
    from ppfleetx.commands.mindspeed_programs import run

    run(sys.argv[1:], _HERE.with_name("pretrain_gpt_38BV3.yaml"))


if __name__ == "__main__":
    run_tool(main)
