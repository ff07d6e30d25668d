#!/usr/bin/env python3
"""Build the index maps of a configuration before a run: the same as `ppfleetx index`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("index")
