#!/usr/bin/env python3
"""Run a training command, and restart it when it fails: the same as `ppfleetx supervise`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("supervise")
