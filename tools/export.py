#!/usr/bin/env python3
"""Export a checkpoint as a stand-alone program that generates text: the same as `ppfleetx export`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("export")
