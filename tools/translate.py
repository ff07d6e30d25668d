#!/usr/bin/env python3
"""Print the configuration of another toolkit as one of ppfleetx: the same as `ppfleetx translate`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("translate")
