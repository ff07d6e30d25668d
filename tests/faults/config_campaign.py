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
from collections.abc import Callable, Sequence
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
    slowest_seconds: float = 0.0
    slowest: str = ""

    @property
    def cases(self) -> int:
        return self.accepted + self.refused + len(self.failures)

    def take(self, name: str, check: Callable[[], None], is_placed: Callable[[ConfigError], bool]) -> None:
        """Run one case and judge it."""
        start = time.process_time()
        signal.alarm(_HANGS_AFTER)
        try:
            check()
            self.accepted += 1
        except ConfigError as error:
            wrong = _wrong_words(error, is_placed)
            if wrong:
                self.failures.append(f"{name}: {wrong}: {str(error)[:300]!r}")
            else:
                self.refused += 1
        except Exception as error:  # noqa: BLE001 every other kind is what is looked for
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        finally:
            signal.alarm(0)
        seconds = time.process_time() - start
        if seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest = seconds, name
        if seconds > MAX_SECONDS:
            self.failures.append(f"{name}: took {seconds:.1f} s")


def _wrong_words(error: ConfigError, is_placed: Callable[[ConfigError], bool]) -> str | None:
    """What is wrong with a message; None when it is as it should be."""
    message = str(error)
    if not error.place or not is_placed(error):
        return "no place"
    if len(message) > _MAX_MESSAGE:
        return f"{len(message)} characters"
    if not all(line.isprintable() for line in message.splitlines()):
        return "control characters"
    if " object at 0x" in message or "Node(" in message or "<object" in message:
        return "an object's name"
    return None


def _check(path: Path, overrides: Sequence[str]) -> None:
    check_report(load_config(path, overrides))


def shipped() -> list[Path]:
    """All shipped files, as paths within the folder of configurations."""
    return sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))


def run_files(directory: Path, count: int, seed: int, tally: Tally) -> None:
    """Mutate so many files. ``directory`` holds a copy of the configurations; each case is a file in it."""
    names = shipped()
    for number in range(count):
        rng = random.Random(f"file {seed} {number}")
        source = names[number % len(names)]
        content, what = mutated((CONFIGS / source).read_bytes(), rng)
        path = (directory / source).with_name("mutated.yaml")
        path.write_bytes(content)
        overrides = ["Global.seed=1"] if rng.random() < 0.2 else []

        def is_placed(error: ConfigError) -> bool:
            # A file that is no YAML at all has a place and no key.
            return error.key is not None or ".yaml" in error.place

        tally.take(
            f"file {number} of {source} ({', '.join(what)})",
            lambda p=path, o=overrides: _check(p, o),
            is_placed,
        )
        path.unlink()


def run_overrides(directory: Path, count: int, seed: int, tally: Tally) -> None:
    """Give so many sets of one to four overrides to shipped files."""
    names = [name for name in shipped() if "_base_" not in name.parts]
    for number in range(count):
        rng = random.Random(f"override {seed} {number}")
        source = names[number % len(names)]
        overrides = [override(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 4, 8)))]
        shown = ", ".join(repr(text[:80]) for text in overrides)
        tally.take(
            f"override {number} on {source} ({shown})",
            lambda p=directory / source, o=overrides: _check(p, o),
            lambda error: error.key is not None or error.place.startswith("-o override "),
        )


def campaign(files: int, overrides: int, seed: int) -> Tally:
    """Run so many cases of both kinds."""
    tally = Tally()

    def hang(number: int, frame: FrameType | None) -> None:
        raise HangError(f"did not end within {_HANGS_AFTER} s")

    previous = signal.signal(signal.SIGALRM, hang)
    here = os.getcwd()
    try:
        with tempfile.TemporaryDirectory(prefix="configs-") as name:
            directory = Path(name) / "configs"
            shutil.copytree(CONFIGS, directory)
            os.mkfifo(Path(name) / "pipe")
            os.chdir(name)
            run_files(directory, files, seed, tally)
            run_overrides(directory, overrides, seed, tally)
    finally:
        os.chdir(here)
        signal.signal(signal.SIGALRM, previous)
    return tally


def main() -> int:
    args = command_line(__doc__, files=2000, overrides=600).parse_args()
    tally = campaign(args.files, args.overrides, args.seed)
    counts = {"accepted": tally.accepted, "refused in words": tally.refused}
    slowest = f"{tally.slowest_seconds:.2f} s of the processor ({tally.slowest})"
    return conclude(
        counts, tally.failures, f"{len(tally.failures)} of {tally.cases} failed; at most {slowest}"
    )


if __name__ == "__main__":
    sys.exit(main())
