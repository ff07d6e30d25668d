#!/usr/bin/env python3
"""Make a checkpoint of Hugging Face's GPT-2 weights, for --load_checkpoint.

example:
  python mindformers/models/gpt2/convert_weight.py --layers 12 --torch_path pytorch_model.bin \\
      --mindspore_path ./mindspore_gpt2.ckpt
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[5]))

from ppfleetx.utils.exit_codes import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=12, help="layers of the model (12)")
    add("--torch_path", required=True, metavar="FILE", help="pytorch_model.bin or model.safetensors")
    add("--mindspore_path", required=True, metavar="DIR", help="the checkpoint: a new or empty directory")
    add(
        "--num_heads",
        type=int,
        help="attention heads, where no config.json lies beside the file (width / 64)",
    )
    args = parser.parse_args()
    from ppfleetx.commands.mindformers_programs import convert_weight

    written = convert_weight(
        Path(args.torch_path), Path(args.mindspore_path), layers=args.layers, num_heads=args.num_heads
    )
    print(f"written: {written}")


if __name__ == "__main__":
    run_tool(main)
