"""Predict memory and step time of a configuration under one plan, or rank all plans of a number of cards."""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    from ppfleetx.planner.command import add_plan_arguments

    add_config_arguments(parser)
    add_plan_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print the prediction."""
    from ppfleetx.planner.command import run_plan

    print(run_plan(args))
