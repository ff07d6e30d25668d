"""Train a byte-level BPE tokenizer on text: json lines (.gz, .zst), plain text files, folders of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ppfleetx.config.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--input", required=True, nargs="+", metavar="PATH", help="files and folders")
    parser.add_argument(
        "--vocab-size", required=True, type=int, metavar="N", help="tokens, special ones included"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="where the files are written"
    )
    parser.add_argument("--min-frequency", type=int, default=2, metavar="N", help="rarest pair to merge (2)")
    parser.add_argument("--json-key", default="text", help="key of the text in json lines (text)")
    parser.add_argument(
        "--suffixes", default="", metavar=".py,.txt", help="in folders take only files with these endings"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is there already")


def run(args: argparse.Namespace) -> None:
    """Train and write, with a progress bar over the bytes read."""
    from ppfleetx.data.prepare.corpus import find_sources, iterate_texts
    from ppfleetx.data.tokenizer.training import train_tokenizer
    from ppfleetx.utils.progress import ProgressBar

    if (args.output / "tokenizer.json").exists() and not args.overwrite:
        raise DataError(f"{args.output} holds a tokenizer already; --overwrite replaces it")
    if args.output.exists() and not args.output.is_dir():  # before hours of training
        raise DataError(f"{args.output} is a file; --output names a directory")
    suffixes = [suffix for suffix in args.suffixes.split(",") if suffix]
    sources = find_sources(args.input, suffixes=suffixes)
    total = sum(source.num_bytes for source in sources) / 1e6
    with ProgressBar("reading", total=total, unit="MB") as bar:

        def texts() -> Iterator[str]:
            for text in iterate_texts(sources, args.json_key):
                bar.advance(len(text) / 1e6)
                yield text
            bar.advance(0, "learning merges")

        tokenizer = train_tokenizer(texts(), args.vocab_size, min_frequency=args.min_frequency)
    tokenizer.save(args.output)
    print(
        f"tokenizer with {tokenizer.vocab_size:,} tokens, end of document {tokenizer.eod_id}: {args.output}"
    )
