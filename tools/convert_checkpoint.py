#!/usr/bin/env python3
"""Convert checkpoints between formats: the same as `ppfleetx convert`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("convert")
