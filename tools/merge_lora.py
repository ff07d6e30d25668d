#!/usr/bin/env python3
"""Merge trained adapters into the weights that they belong to: the same as `ppfleetx merge`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("merge")
