#!/usr/bin/env python3
"""Encode text as a tokenized corpus: the same as `ppfleetx prepare`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("prepare")
