#!/usr/bin/env python3
"""Merge several .bin/.idx corpora into one: the same as `ppfleetx merge-data`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("merge-data")
