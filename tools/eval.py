#!/usr/bin/env python3
"""Evaluate a checkpoint (Engine.save_load.ckpt_dir): the same as `ppfleetx eval`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("eval")
