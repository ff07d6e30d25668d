"""Show what a tokenised corpus holds, compare it with its checksums, or write checksums for it.

Exit code: 0 all is well; 1 damage was found (--verify); 2 there is no corpus that could be looked at, or the
command line is wrong.
"""

from __future__ import annotations

import argparse
import json

from ppfleetx.config.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("corpus", nargs="+", metavar="PREFIX", help="corpora without .bin/.idx, or folders of them")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="read everything and compare all checksums")
    what.add_argument("--write-checksums", action="store_true",
        help="write PREFIX.checksums.json for a pair as it is now")  # fmt: skip
    what.add_argument("--json", action="store_true", help="print the summary as JSON, an object a corpus")


def run(args: argparse.Namespace) -> int:
    """Do what was asked for."""
    from ppfleetx.data.corpus_paths import find_prefixes

    code = 0
    for prefix in [prefix for entry in args.corpus for prefix in find_prefixes(entry)]:
        if args.verify:
            code = max(code, verify(prefix))
        elif args.write_checksums:
            write_checksums(prefix)
        else:
            show(prefix, args.json)
    return code


def show(prefix: str, as_json: bool) -> None:
    """Print what the corpus holds."""
    from ppfleetx.data.prepare.corpus_summary import summary, summary_text

    facts = summary(prefix)
    print(json.dumps(facts) if as_json else summary_text(facts))


def verify(prefix: str) -> int:
    """Compare a corpus with its checksums; prints each damage."""
    from ppfleetx.data.verify import all_damage

    found, has_checksums = all_damage(prefix)
    for sentence in found:
        print(f"damaged: {sentence}")
    if not found:
        checked = "all checksums right" if has_checksums else "lengths and offsets agree; it has no checksums"
        print(f"sound: {prefix}, {checked}")
    return 1 if found else 0


def write_checksums(prefix: str) -> None:
    """Write the checksums of a pair that has none.

    Raises:
        DataError: the pair is damaged, or has checksums already.
    """
    from ppfleetx.data.checksums import checksums_path, compute_checksums
    from ppfleetx.data.indexed import IndexedDataset

    IndexedDataset(prefix)  # what is damaged for all to see gets none
    path = checksums_path(prefix)
    if path.exists():
        raise DataError(f"{path} exists already; if the corpus was changed on purpose, remove it first")
    compute_checksums(prefix).write()
    print(f"wrote {path}")
