#!/usr/bin/env python3
"""Predict memory and step time of plans, or rank them: the same as `ppfleetx plan`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("plan")
