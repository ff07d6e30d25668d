#!/usr/bin/env python3
"""Continue prompts with an exported model: the same as `ppfleetx infer`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("infer")
