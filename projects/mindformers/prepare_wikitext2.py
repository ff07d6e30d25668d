#!/usr/bin/env python3
"""Make corpora of WikiText-2: OUTPUT_DIR/{train,valid,test}/wikitext.{bin,idx}. Nothing is downloaded.

example:
  python prepare_wikitext2.py --input wikitext-2-v1.zip --output_dir wikitext-2 --tokenizer gpt2/
  python run_mindformer.py --config configs/gpt2/run_gpt2.yaml --dataset_dir wikitext-2/train
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.utils.exit_codes import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", required=True, metavar="PATH", help="the zip, or a folder with wiki.train.tokens")
    add("--output_dir", required=True, metavar="DIR", help="where the corpora go")
    add("--tokenizer", metavar="DIR", help="folder with tokenizer.json, or with vocab.json and merges.txt")
    add("--vocab_file", metavar="FILE", help="vocab.json, in place of --tokenizer")
    add("--merge_file", metavar="FILE", help="merges.txt, with --vocab_file")
    add("--seq_length", type=int, default=1024, metavar="N", help="tokens that the model reads (1024)")
    add("--overwrite", action="store_true", help="replace corpora that already exist")
    args = parser.parse_args()
    from ppfleetx.config.errors import ConfigError
    from ppfleetx.data.prepare.wikitext import prepare_wikitext
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

    if args.seq_length < 1:
        raise ConfigError("must be at least 1", key="--seq_length", value=args.seq_length)
    if (args.tokenizer is None) == (args.vocab_file is None) or bool(args.vocab_file) != bool(
        args.merge_file
    ):
        raise ConfigError("is needed, or --vocab_file and --merge_file", key="--tokenizer")
    if args.tokenizer is not None:
        tokenizer = Tokenizer.load(args.tokenizer)
    else:
        tokenizer = Tokenizer.from_vocab_and_merges(args.vocab_file, args.merge_file)
    source, output = Path(args.input), Path(args.output_dir)
    for report in prepare_wikitext(
        source, output, tokenizer, length=args.seq_length, overwrite=args.overwrite
    ):
        print(report)


if __name__ == "__main__":
    run_tool(main)
