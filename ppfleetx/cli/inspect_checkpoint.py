"""Show what a checkpoint holds, recompute its checksums, or compare two.

Exit code: 0 all is well; 1 damage was found (--verify) or a difference (--diff); 2 there is no checkpoint
that could be looked at, or the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import CheckpointError, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("checkpoint", nargs="?", metavar="DIR",
        help="step directory, output directory, rank directory, or a directory of FleetX")  # fmt: skip
    add("--verify", action="store_true", help="read everything and compare all checksums")
    add("--diff", nargs=2, metavar=("A", "B"), help="list the tensors in which two checkpoints differ")
    add("--filter", metavar="REGEX", help="only tensors whose name (name/state) this is found in")
    add("--json", action="store_true", help="print the summary as JSON, without the table")


def run(args: argparse.Namespace) -> int:
    """Do what was asked for."""
    if (args.checkpoint is None) == (args.diff is None):
        raise ConfigError("give one checkpoint DIR, or --diff A B")
    if args.diff and (args.verify or args.json):
        raise ConfigError("--diff goes with --filter only")
    pattern = compile_pattern(args.filter)
    if args.diff:
        return compare(*args.diff, pattern)
    if args.verify:
        return verify(args.checkpoint)
    from ppfleetx.checkpoint import inspect

    checkpoint = inspect.open_for_inspection(args.checkpoint)
    facts = inspect.summary(checkpoint)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    print(inspect.summary_text(facts))
    print()
    print(inspect.table(inspect.tensors_of(checkpoint, pattern)))
    return 0


def compile_pattern(text: str | None) -> re.Pattern[str] | None:
    """The pattern of --filter. Raises ConfigError when it is none."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"--filter {text!r} is not a regular expression: {error}") from error


def verify(path: str) -> int:
    """Check all of a checkpoint; prints each damage.

    Raises:
        CheckpointError: there is no such directory.
    """
    from ppfleetx.checkpoint import inspect

    if not Path(path).is_dir():
        raise CheckpointError(f"there is no directory {path}")
    try:
        checkpoint = inspect.open_for_inspection(path)
    except CheckpointError as error:
        print(f"damaged: {error}")
        return 1
    damage = list(checkpoint.damage())
    for sentence in damage:
        print(f"damaged: {sentence}")
    if not damage:
        count = len(checkpoint.manifest.files)
        checked = (
            f"all checksums right in {counted(count, 'data file')}"
            if count
            else "all tensors readable; it has no checksums"
        )
        print(f"sound: {checkpoint.path}, {counted(len(checkpoint.manifest.tensors), 'tensor')}, {checked}")
    return 1 if damage else 0


def compare(one: str, other: str, pattern: re.Pattern[str] | None) -> int:
    """Print the differences between two checkpoints."""
    from ppfleetx.checkpoint import inspect

    checkpoints = [inspect.open_for_inspection(path) for path in (one, other)]
    count = 0
    for difference in inspect.differences(*checkpoints, pattern):
        kind, name, state = difference.key
        print(f"{kind} {name}{f'/{state}' if state else ''}: {difference.what}")
        count += 1
    differ = f"{counted(count, 'tensor')} {'differs' if count == 1 else 'differ'}"
    print(differ if count else "no differences")
    return 1 if count else 0
