#!/usr/bin/env python3
"""Train a byte-level BPE tokenizer: the same as `ppfleetx tokenizer`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("tokenizer")
