"""Mutated configurations and overrides: each is accepted or refused in words, soon and in little memory.

``python -m tests.faults.config_campaign --files 2000 --overrides 600`` takes the shipped files, changes one
to three things in each (keys, values, structure, bytes), and asks for the report of ``tools/train.py
--check``. It runs in a process of its own, whose memory is measured. Any failure can be made again from seed
and number.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
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

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "ppfleetx/configs"
MAX_SECONDS = 5.0  # of the processor
MAX_MIB = 500
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
    peak_mib: int = 0

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
    """Run so many cases of both kinds, in this process; memory is what they take more than it had."""
    tally, before = Tally(), _most_mib()

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
    tally.peak_mib = _most_mib() - before
    if tally.peak_mib > MAX_MIB:
        tally.failures.append(f"{tally.peak_mib} MiB of memory")
    return tally


def _most_mib() -> int:
    """The most memory that this program has had. (``ru_maxrss`` counts the process that started it too.)"""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) >> 10


def in_child(files: int, overrides: int, seed: int) -> Tally:
    """:func:`campaign` in a process of its own."""
    command = [sys.executable, "-m", "tests.faults.config_campaign", "--in-process", f"--files={files}"]
    command += [f"--overrides={overrides}", f"--seed={seed}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise AssertionError(f"the campaign ended with {done.returncode}: {done.stderr[-2000:]}")
    return Tally(**json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--overrides", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-process", action="store_true", help="print what in_child reads")
    args = parser.parse_args()
    if args.in_process:
        print(json.dumps(vars(campaign(args.files, args.overrides, args.seed))))
        return 0
    tally = in_child(args.files, args.overrides, args.seed)
    for failure in tally.failures:
        print(failure)
    print(
        f"{tally.cases} cases: {tally.accepted} accepted, {tally.refused} refused in words, "
        f"{len(tally.failures)} failures; at most {tally.slowest_seconds:.2f} s of the processor "
        f"({tally.slowest}) and {tally.peak_mib} MiB"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
