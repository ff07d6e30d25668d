"""Write the source files of this Python's standard library as json lines: a corpus without a download."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="json lines file to write")
    parser.add_argument("--seed", type=int, default=1234, help="of the order of the documents (1234)")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there already")


def run(args: argparse.Namespace) -> None:
    """Write the file."""
    from ppfleetx.data.prepare.stdlib_corpus import write_stdlib_corpus

    num_documents, num_bytes = write_stdlib_corpus(args.output, args.seed, overwrite=args.overwrite)
    print(f"{num_documents:,} documents, {num_bytes / 1e6:.1f} MB of text: {args.output}")
