#!/usr/bin/env python3
"""Make the corpus that the training scripts read: dataset_preprocess_gpt.sh."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ppfleetx.commands.main import run_function

if __name__ == "__main__":
    run_function("megatron_programs:prepare_gpt2_corpus", sys.argv[1:])
