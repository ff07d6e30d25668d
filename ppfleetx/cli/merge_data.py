"""Write several .bin/.idx corpora as one, in the order given (a directory: all its corpora, by name)."""

from __future__ import annotations

import argparse

from ppfleetx.config.counts import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--input", required=True, nargs="+", metavar="PATH", help="prefixes and directories")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path of the result without .bin/.idx"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there already")


def run(args: argparse.Namespace) -> None:
    """Merge, and say what was written."""
    from ppfleetx.data.corpus_paths import find_prefixes
    from ppfleetx.data.indexed import IndexedDataset
    from ppfleetx.data.prepare.merging import merge

    prefixes = [prefix for path in args.input for prefix in find_prefixes(path)]
    merge(prefixes, args.output_prefix, overwrite=args.overwrite)
    merged = IndexedDataset(args.output_prefix)
    documents = merged.document_indices.shape[0] - 1
    print(
        f"{args.output_prefix}: {counted(len(prefixes), 'corpus')}, {counted(documents, 'document', ',')}, "
        f"{counted(merged.num_tokens, 'token', ',')}"
    )
