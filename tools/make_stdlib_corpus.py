#!/usr/bin/env python3
"""Write the sources of Python as a corpus of JSON lines: the same as `ppfleetx stdlib-corpus`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("stdlib-corpus")
