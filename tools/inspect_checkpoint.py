#!/usr/bin/env python3
"""Show a checkpoint, recompute its checksums, or compare two: the same as `ppfleetx inspect`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("inspect")
