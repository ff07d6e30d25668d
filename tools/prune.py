#!/usr/bin/env python3
"""Remove heads, units and layers from a checkpoint: the same as `ppfleetx prune`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("prune")
