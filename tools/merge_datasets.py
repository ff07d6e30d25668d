#!/usr/bin/env python3
"""Write several .bin/.idx corpora as one, in the order given (a directory: all its corpora, by name)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppfleetx.config.counts import counted
from ppfleetx.utils.cli import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, nargs="+", metavar="PATH", help="prefixes and directories")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path of the result without .bin/.idx"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there already")
    args = parser.parse_args()

    from ppfleetx.data.indexed import IndexedDataset
    from ppfleetx.data.prefixes import find_prefixes
    from ppfleetx.data.prepare.merging import merge

    prefixes = [prefix for path in args.input for prefix in find_prefixes(path)]
    merge(prefixes, args.output_prefix, overwrite=args.overwrite)
    merged = IndexedDataset(args.output_prefix)
    documents = merged.document_indices.shape[0] - 1
    print(
        f"{args.output_prefix}: {counted(len(prefixes), 'corpus')}, {counted(documents, 'document', ',')}, "
        f"{counted(merged.num_tokens, 'token', ',')}"
    )


if __name__ == "__main__":
    run_tool(main)
