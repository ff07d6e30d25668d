"""Mutated configurations and overrides: each is accepted or refused in words, and soon.

``python -m tests.faults.config_campaign --files 2000 --overrides 600`` takes the shipped files, changes one
to three things in each (keys, values, structure, bytes), and asks for the report of ``tools/train.py
--check``. Any failure can be made again from seed and number.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from tests.faults.config_mutations import mutated, override
from tests.faults.harness import command_line, conclude

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "ppfleetx/configs"
MAX_SECONDS = 5.0  # of the processor
_MAX_MESSAGE = 6000
_HANGS_AFTER = 60  # seconds, on a machine that others use too


class HangError(Exception):
    """A case did not end."""


@dataclass
class Tally:
    """What became of the cases."""

    accepted: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.accepted + self.refused + len(self.failures)

    def take(self, name: str, path: Path, overrides: Sequence[str], place: str) -> None:
        """Run one case and judge it; a message without a key has ``place`` in its place."""
        start = time.process_time()
        signal.alarm(_HANGS_AFTER)
        wrong = None
        try:
            check_report(load_config(path, overrides))
            self.accepted += 1
        except ConfigError as error:
            wrong = _wrong_words(error, place)
            self.refused += wrong is None
        except Exception as error:  # noqa: BLE001 every other kind is what is looked for
            wrong = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
        if time.process_time() - start > MAX_SECONDS:
            wrong = f"took {time.process_time() - start:.1f} s"
        if wrong is not None:
            self.failures.append(f"{name}: {wrong[:400]}")


def _wrong_words(error: ConfigError, place: str) -> str | None:
    """What is wrong with a message; None when it is as it should be."""
    message = str(error)
    if not error.place or (error.key is None and place not in error.place):
        return f"no place: {message}"
    if len(message) > _MAX_MESSAGE or not all(line.isprintable() for line in message.splitlines()):
        return f"unreadable: {message!r}"
    if " object at 0x" in message or "<object" in message:
        return f"an object's name: {message}"
    return None


def campaign(files: int, overrides: int, seed: int) -> Tally:
    """Mutate so many files, and give so many sets of overrides to sound ones."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise HangError(f"did not end within {_HANGS_AFTER} s")

    tally, here = Tally(), os.getcwd()
    names = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
    previous = signal.signal(signal.SIGALRM, hang)
    try:
        with tempfile.TemporaryDirectory(prefix="configs-") as name:
            directory = Path(name) / "configs"
            shutil.copytree(CONFIGS, directory)
            os.chdir(name)
            for number in range(files):
                rng = random.Random(f"file {seed} {number}")
                source = names[number % len(names)]
                content, what = mutated((CONFIGS / source).read_bytes(), rng)
                path = (directory / source).with_name("mutated.yaml")
                path.write_bytes(content)
                tally.take(f"file {number} of {source} ({', '.join(what)})", path, [], ".yaml")
                path.unlink()
            whole = [source for source in names if "_base_" not in source.parts]
            for number in range(overrides):
                rng = random.Random(f"override {seed} {number}")
                source = whole[number % len(whole)]
                given = [override(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 4, 8)))]
                shown = ", ".join(repr(text[:80]) for text in given)
                tally.take(
                    f"override {number} on {source} ({shown})", directory / source, given, "-o override "
                )
    finally:
        os.chdir(here)
        signal.signal(signal.SIGALRM, previous)
    return tally


def main() -> int:
    args = command_line(__doc__, files=2000, overrides=600).parse_args()
    tally = campaign(args.files, args.overrides, args.seed)
    counts = {"accepted": tally.accepted, "refused in words": tally.refused}
    return conclude(counts, tally.failures, f"{len(tally.failures)} of {tally.cases} failed")


if __name__ == "__main__":
    sys.exit(main())
