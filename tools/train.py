#!/usr/bin/env python3
"""Pretrain or finetune the model of a YAML configuration: the same as `ppfleetx train`."""

from run_verb import run_program

if __name__ == "__main__":
    run_program("train")
