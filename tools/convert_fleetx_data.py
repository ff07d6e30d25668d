#!/usr/bin/env python3
"""Write a corpus preprocessed by FleetX as a .bin/.idx pair: the same as `ppfleetx convert-data`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("convert-data")
