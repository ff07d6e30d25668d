#!/usr/bin/env python3
"""Serve a checkpoint over HTTP: the same as `ppfleetx serve`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("serve")
