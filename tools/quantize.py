#!/usr/bin/env python3
"""Store the weights of a checkpoint in 8 or 4 bits: the same as `ppfleetx quantize`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("quantize")
