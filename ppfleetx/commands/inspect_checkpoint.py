"""Implement ``ppfleetx inspect``, which shows, verifies or compares checkpoints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.commands.options import Command, option, positional, switch
from ppfleetx.config.errors import CheckpointError, ConfigError, naming
from ppfleetx.config.message_text import counted


@dataclass(frozen=True, kw_only=True)
class Inspect(Command):
    """Show the contents of a checkpoint, recompute its checksums, or compare two checkpoints.

    Exit code: 0 no damage and no difference; 1 damage (--verify) or a difference (--diff) was found; 2 there
    is no readable checkpoint, or the command line is wrong.
    """

    checkpoint: str | None = positional(
        "DIR", "step directory, output directory, rank directory, or a directory of FleetX"
    )
    verify: bool = switch("read everything and compare all checksums")
    diff: tuple[str, str] | None = option(
        "list the tensors in which two checkpoints differ", metavar=("A", "B")
    )
    filter: str | None = option("only tensors whose name (name/state) matches", metavar="REGEX")
    json: bool = switch("print the summary as JSON, without the table")

    def run(self) -> int:
        if (self.checkpoint is None) == (self.diff is None):
            raise ConfigError("give one checkpoint DIR, or --diff A B")
        if self.diff and (self.verify or self.json):
            raise ConfigError("--diff goes with --filter only")
        if self.verify and (self.json or self.filter):
            raise ConfigError("--verify goes with neither --json nor --filter")
        if self.json and self.filter:
            raise ConfigError(
                "--json prints the summary only, which --filter does not change; give one of them"
            )
        pattern = compile_pattern(self.filter)
        if self.diff:
            return compare(*self.diff, pattern)
        if self.verify:
            return verify(self.checkpoint)
        from ppfleetx.checkpoint import inspect
        from ppfleetx.checkpoint.resolve_checkpoint import open_named

        with naming("DIR", self.checkpoint):
            checkpoint = open_named(self.checkpoint)
        facts = inspect.summary(checkpoint)
        if self.json:
            print(json.dumps(facts, indent=2))
            return 0
        print(inspect.summary_text(facts))
        print()
        print(inspect.table(inspect.tensors_of(checkpoint, pattern)))
        return 0


def compile_pattern(text: str | None) -> re.Pattern[str] | None:
    """Compile the regular expression of ``--filter``, if it is given. Raises ConfigError if the expression is
    invalid."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"--filter {text!r} is not a regular expression: {error}") from error


def verify(path: str) -> int:
    """Check a checkpoint for damage, and print what was found. Its checksums are verified if it has them.
    Returns the exit code: 1 for damage, else 0."""
    from ppfleetx.checkpoint.resolve_checkpoint import open_named

    if not Path(path).is_dir():
        raise CheckpointError(f"DIR = {path!r}: there is no directory {path}")
    try:
        checkpoint = open_named(path)
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
    """Print the tensors that differ between two checkpoints. Returns the exit code: 1 if any tensor differs,
    else 0."""
    from ppfleetx.checkpoint import inspect
    from ppfleetx.checkpoint.resolve_checkpoint import open_named

    checkpoints = []
    for path in (one, other):
        with naming("--diff", path):
            checkpoints.append(open_named(path))
    count = 0
    for difference in inspect.differences(*checkpoints, pattern):
        kind, name, state = difference.key
        print(f"{kind} {name}{f'/{state}' if state else ''}: {difference.what}")
        count += 1
    differ = f"{counted(count, 'tensor')} {'differs' if count == 1 else 'differ'}"
    print(differ if count else "no differences")
    return 1 if count else 0
