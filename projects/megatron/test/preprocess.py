#!/usr/bin/env python3
"""Make the corpus that the training scripts read: dataset_preprocess_gpt.sh."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ppfleetx.utils.exit_codes import run_tool


def main() -> None:
    from ppfleetx.commands.megatron_programs import prepare_gpt2_corpus

    prepare_gpt2_corpus(sys.argv[1:])


if __name__ == "__main__":
    run_tool(main)
