#!/usr/bin/env python3
"""Draw the loss curves of a run's metrics.jsonl to a PNG: the same as `ppfleetx plot`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("plot")
