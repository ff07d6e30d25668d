#!/usr/bin/env python3
"""Predict memory and step time of a configuration under one plan, or rank all plans of a number of cards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppfleetx.utils.cli import add_config_arguments, run_tool


def main() -> None:
    from ppfleetx.planner.command import add_plan_arguments, run_plan

    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    add_plan_arguments(parser)
    print(run_plan(parser.parse_args()))


if __name__ == "__main__":
    run_tool(main)
