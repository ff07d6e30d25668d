#!/usr/bin/env python3
"""Compare the losses of two runs: the same as `ppfleetx compare`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("compare")
