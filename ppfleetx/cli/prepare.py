"""Encode json lines (.gz, .zst), plain text or folders of text to PREFIX_KEY_document.{bin,idx}.

Option names of Megatron-LM and PaddleFleetX are accepted where they mean the same.
"""

from __future__ import annotations

import argparse
import os

from ppfleetx.config.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("--input", "--input_path", "--input-path", required=True, nargs="+", metavar="PATH",
        help="files and folders, in the order they are to be written")  # fmt: skip
    add(
        "--output-prefix",
        "--output_prefix",
        required=True,
        metavar="PREFIX",
        help="start of the output names",
    )
    add("--tokenizer", "--tokenizer-model", "--model_name", metavar="DIR",
        help="folder with tokenizer.json, or with vocab.json and merges.txt")  # fmt: skip
    add("--vocab-file", "--vocab_file", metavar="FILE", help="vocab.json, in place of --tokenizer")
    add("--merge-file", "--merge_file", metavar="FILE", help="merges.txt, with --vocab-file")
    add("--eod-token", metavar="TOKEN",
        help="end of a document (the eos_token of the tokenizer's files, else <|endoftext|>)")  # fmt: skip
    add("--json-keys", "--json-key", "--json_key", "--json_keys", nargs="+", default=["text"], metavar="KEY",
        help="keys of the json objects, one pair of files each (text)")  # fmt: skip
    add("--append-eod", "--append_eod", "--append_eos", "--append-eos", action="store_true",
        help="end each document with the end-of-document token")  # fmt: skip
    add("--workers", type=int, default=None, metavar="N", help="processes (as many as there are cores)")
    add("--suffixes", default="", metavar=".py,.txt", help="in folders take only files with these endings")
    add("--split-on", choices=["file", "line", "blank-line"], default="file",
        help="what one document of a plain text file is (file)")  # fmt: skip
    add(
        "--max-document-mb",
        type=float,
        default=64,
        metavar="N",
        help="longest line, paragraph or packed file, in 10^6 bytes; what is longer is left out (64)",
    )
    add("--strict", action="store_true", help="an empty or unreadable document is an error")
    add("--overwrite", action="store_true", help="replace an output that is there already")


def run(args: argparse.Namespace) -> None:
    """Do what was asked for."""
    from ppfleetx.data.prepare.corpus import find_sources
    from ppfleetx.data.prepare.preprocess import preprocess

    workers = available_cores() if args.workers is None else args.workers
    if workers < 1:
        raise DataError(f"--workers {workers}: at least 1 is needed")
    suffixes = [suffix for suffix in args.suffixes.split(",") if suffix]
    sources = find_sources(args.input, suffixes=suffixes, split_on=args.split_on)
    report = preprocess(
        sources,
        args.output_prefix,
        load_tokenizer(args),
        keys=args.json_keys,
        append_eod=args.append_eod,
        workers=workers,
        strict=args.strict,
        max_document_bytes=max_document_bytes(args.max_document_mb),
        overwrite=args.overwrite,
    )
    print(report)


def max_document_bytes(megabytes: float) -> int:
    """The bytes of --max-document-mb.

    Raises:
        DataError: less than 0.001 or more than 2000.
    """
    if not 0.001 <= megabytes <= 2000:
        raise DataError(f"--max-document-mb {megabytes:g}: from 0.001 to 2000 is possible")
    return round(1e6 * megabytes)


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_tokenizer(args: argparse.Namespace):
    """The tokenizer the command line names.

    Raises:
        DataError: not exactly one tokenizer is named, or its files cannot be used.
    """
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

    if (args.tokenizer is None) == (args.vocab_file is None) or bool(args.vocab_file) != bool(
        args.merge_file
    ):
        raise DataError("give --tokenizer, or --vocab-file and --merge-file")
    if args.tokenizer is not None:
        return Tokenizer.load(args.tokenizer, eod_token=args.eod_token)
    return Tokenizer.from_vocab_and_merges(args.vocab_file, args.merge_file, eod_token=args.eod_token)
