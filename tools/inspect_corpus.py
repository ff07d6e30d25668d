#!/usr/bin/env python3
"""Show a tokenized corpus, or compare it with its checksums: the same as `ppfleetx inspect-data`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("inspect-data")
