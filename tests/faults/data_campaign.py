"""Bad data files, and flipped bits in corpora with checksums.

``python -m tests.faults.data_campaign --files 80 --flips 60`` flips bits in ``.bin`` and ``.idx``, of which
``tools/inspect_corpus.py --verify`` must find each. Then it gives each file of `hostile_data` to a tool in a
process of its own: it must end by itself within 20 s and 1 GB, with one sentence or well, never with a
traceback.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ppfleetx.utils.cli import run_tool
from tests.e2e.program import ROOT
from tests.faults.harness import Ended, command_line, conclude, damaged, flipped, run_to_end
from tests.faults.hostile_data import MAKERS, write_pair
from tests.helpers.texts import small_tokenizer

_HARMLESS = (0, 1, 2)  # 1: inspect_corpus.py has found damage


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
    """Run a tool, or a reader of this file, to its end."""
    program = [str(ROOT / "tools" / f"{name}.py")]
    if name in _READERS:
        program = ["-m", "tests.faults.data_campaign", "--read", name]
    return run_to_end([*program, *arguments], log)


def hostile_campaign(directory: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Try so many files, each kind in turn: how often which kind ended with which code; what was wrong."""
    small_tokenizer().save(directory / "tokenizer")
    rng, ends, failures = random.Random(seed), Counter(), []
    for number in range(count):
        kind = list(MAKERS)[number % len(MAKERS)]
        place = directory / str(number)
        place.mkdir()
        tool, arguments = MAKERS[kind](place, rng)
        end = ended(tool, arguments, directory / f"{number}.log")
        ends[f"{kind}: {end.code}"] += 1
        if complaint := end.complaint(_HARMLESS):
            failures.append(f"{complaint}: {kind} to {tool} {' '.join(arguments)}: {end}")
        shutil.rmtree(place)
    return ends, failures


def flip_campaign(directory: Path, count: int, seed: int) -> Counter[str]:
    """Flip so many bits, one at a time; how many were found in which file. All have to be."""
    rng = random.Random(seed)
    write_pair(directory, rng)
    prefix, found = str(directory / "a"), Counter()
    for number in range(count):
        path = Path(f"{prefix}{rng.choice(['.bin', '.idx'])}")
        with damaged(path, flipped(path.read_bytes(), rng)):
            end = ended("inspect_corpus", [prefix, "--verify"], directory / "log")
            assert end.code == 1 and f"damaged: {path}: block " in end.said, (number, path, end)
        found[path.name] += 1
    assert ended("inspect_corpus", [prefix, "--verify"], directory / "log").code == 0
    return found


def main() -> int:
    parser = command_line(__doc__, files=80, flips=60)
    parser.add_argument("--read", nargs="+", metavar=("READER", "ARGUMENT"), help="only run this reader")
    args = parser.parse_args()
    if args.read:
        run_tool(lambda: _READERS[args.read[0]](*args.read[1:]))
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        flips = flip_campaign(Path(name), args.flips, args.seed)
        ends, failures = hostile_campaign(Path(name), args.files, args.seed)
    well = args.files - len(failures)
    return conclude(
        ends, failures, f"{well} of {args.files} bad files ended well; flips found: {dict(flips)}"
    )


if __name__ == "__main__":
    sys.exit(main())
