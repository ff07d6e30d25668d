"""Hostile data files, and flipped bits in corpora with checksums.

``python -m tests.faults.data_campaign --files 80 --flips 60`` flips bits in ``.bin`` and ``.idx``, of which
``tools/inspect_corpus.py --verify`` must find each. Then it gives each file of `hostile_data` to a tool in a
process of its own: it must end by itself within 20 s and 1 GB, with one sentence or well, never with a
traceback.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.utils.cli import run_tool
from tests.faults.hostile_data import MAKERS, write_pair
from tests.helpers.texts import small_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MAX_SECONDS, MAX_BYTES = 20.0, 10**9
_SLOWEST = 120.0  # after which a child is ended
_HARMLESS = {0, 1, 2}  # 1: inspect_corpus.py has found damage


@dataclass
class Ended:
    """How a child ended.

    Attributes:
        code: exit code, negative for a signal.
        said: what it wrote.
        seconds: wall-clock time.
        cpu_seconds: of it and its children.
        num_bytes: most memory it, or a child of it, held.
    """

    code: int
    said: str
    seconds: float
    cpu_seconds: float
    num_bytes: int


def _evaluation(path: str, tokenizer: str) -> None:
    """What tools/eval.py reads before it needs Paddle."""
    from ppfleetx.config.sections.generation import OfflineEvalConfig
    from ppfleetx.data.tasks.evaluation import read_evaluation_set
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

    cfg = OfflineEvalConfig(eval_path=path, cloze_eval="jsonl" in path, max_seq_len=64, overlapping_eval=64)
    read_evaluation_set(cfg, Tokenizer.load(tokenizer))


def _glue(directory: str) -> None:
    from ppfleetx.data.tasks.glue import TASKS, read_glue

    read_glue(TASKS["SST2"], directory, "train")


_READERS: dict[str, Callable[..., None]] = {"evaluation": _evaluation, "glue": _glue}


def ended(name: str, arguments: list[str], log: Path) -> Ended:
    """Run a tool, or a reader of this file, in a process of its own, to its end."""
    program = [str(ROOT / "tools" / f"{name}.py")]
    if name in _READERS:
        program = ["-m", "tests.faults.data_campaign", "--read", name]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *program, *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    timer = threading.Timer(_SLOWEST, process.kill)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(
        process.returncode,
        log.read_text(errors="replace"),
        time.monotonic() - began,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
    )


def judge(kind: str, case: tuple[str, list[str]], end: Ended) -> str | None:
    """What is wrong with how a tool took a file; None: nothing."""
    told = f"{kind} to {case[0]} {' '.join(case[1])}: exit code {end.code}, {end.seconds:.1f} s, "
    told += f"{end.num_bytes / 1e6:,.0f} MB\n{end.said[-3000:]}"
    if "Traceback" in end.said or end.code not in _HARMLESS:
        return f"no clean end: {told}"
    if min(end.seconds, end.cpu_seconds) > MAX_SECONDS:  # another's load is not this one's fault
        return f"too slow: {told}"
    if end.num_bytes > MAX_BYTES:
        return f"too much memory: {told}"
    sentences = [line for line in end.said.splitlines() if line.startswith("error: ")]
    if end.code == 2 and (len(sentences) != 1 or len(end.said) > 5000):
        return f"not one sentence: {told}"
    return None


def hostile_campaign(directory: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Try so many files, each kind in turn: how often which kind ended with which code; what was wrong."""
    small_tokenizer().save(directory / "tokenizer")
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    failures = []
    for number in range(count):
        kind = list(MAKERS)[number % len(MAKERS)]
        place = directory / str(number)
        place.mkdir()
        case = MAKERS[kind](place, rng)
        end = ended(*case, directory / f"{number}.log")
        ends[f"{kind}: {end.code}"] += 1
        problem = judge(kind, case, end)
        if problem is not None:
            failures.append(problem)
        shutil.rmtree(place)
    return ends, failures


def flip_campaign(directory: Path, count: int, seed: int) -> Counter[str]:
    """Flip so many bits, one at a time; how many were found in which file.

    Raises:
        AssertionError: one was not found, or a sound corpus was said to be damaged.
    """
    rng = random.Random(seed)
    write_pair(directory, rng)
    prefix, found = str(directory / "a"), Counter()
    for number in range(count):
        path = Path(f"{prefix}{rng.choice(['.bin', '.idx'])}")
        sound = path.read_bytes()
        position = rng.randrange(len(sound))
        flipped = bytearray(sound)
        flipped[position] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        end = ended("inspect_corpus", [prefix, "--verify"], directory / "log")
        assert end.code == 1 and f"damaged: {path}: block " in end.said, (number, path, end)
        path.write_bytes(sound)
        found[path.name] += 1
    assert ended("inspect_corpus", [prefix, "--verify"], directory / "log").code == 0
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=80)
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--read", nargs="+", metavar=("READER", "ARGUMENT"), help="only run this reader")
    args = parser.parse_args()
    if args.read:
        run_tool(lambda: _READERS[args.read[0]](*args.read[1:]))
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        flips = flip_campaign(Path(name), args.flips, args.seed)
        ends, failures = hostile_campaign(Path(name), args.files, args.seed)
    for what, times in sorted(ends.items()):
        print(f"{times:4d} {what}")
    for failure in failures:
        print(failure)
    print(
        f"{args.files - len(failures)} of {args.files} hostile files ended well; flips found: {dict(flips)}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
