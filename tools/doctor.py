#!/usr/bin/env python3
"""Check everything that a job needs before it starts: the same as `ppfleetx doctor`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("doctor")
