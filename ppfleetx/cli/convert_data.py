"""Write a corpus preprocessed by FleetX (_ids.npy with _idx.npz, or _ids.npz) as a .bin/.idx pair."""

from __future__ import annotations

import argparse

from ppfleetx.config.counts import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument(
        "--input", required=True, metavar="PREFIX", help="path of the corpus without _ids.npy"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path of the result without .bin/.idx"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there already")


def run(args: argparse.Namespace) -> None:
    """Convert, and say what was written."""
    from ppfleetx.data.fleetx_format import convert
    from ppfleetx.data.indexed import IndexedDataset

    convert(args.input, args.output_prefix, overwrite=args.overwrite)
    written = IndexedDataset(args.output_prefix)
    documents = written.document_indices.shape[0] - 1
    print(
        f"{args.output_prefix}: {counted(documents, 'document', ',')}, "
        f"{counted(written.num_tokens, 'token', ',')}, {written.dtype}"
    )
