"""What other toolkits' own configurations come to here: ``python -m tests.dialects.upstream DIR``.

DIR holds checkouts of Megatron-LM and PaddleFleetX, as they are. Megatron's functional tests and example
scripts go through ``translate``; FleetX's YAMLs, scripts and test_tipc lists through ``--check``. What is
refused is grouped by its reason. Scripts run in bash without any program (``PATH`` leads nowhere): what they
would start is written down instead.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ppfleetx.commands.check import check_report
from ppfleetx.commands.translate import translation_of
from ppfleetx.config.errors import ConfigError, UserError
from ppfleetx.config.loader import load_config, load_tree
from ppfleetx.config.sections.data import GLUE_OUTPUTS
from ppfleetx.dialects.given import refuse_other_models, without_launcher
from ppfleetx.dialects.megatron.dialect import of_file

MOST_RANKS = 64
# The arguments that Megatron's example scripts of GPT take; others need none.
ARGUMENTS = ("checkpoints", "tensorboard", "gpt2-vocab.json", "gpt2-merges.txt", "corpus_text_document")
_BASH = """
command_not_found_handle() {
    case "$1" in
        bash) shift; /bin/bash "$@" ;;
        expr) shift; echo $(($*)) ;;
        *) printf '%s\\0' "$PWD" "$@" '' >> "$RECORD" ;;
    esac
}
"""


@dataclass(frozen=True)
class Started:
    """A program that a script would start: where, and its command line."""

    script: Path
    directory: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.script}: {' '.join(self.words)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--files", action="store_true", help="name the files of each reason")
    arguments = parser.parse_args()
    logging.disable()
    directory = arguments.directory.resolve()
    for title, found, take in (
        ("Megatron-LM, functional tests", megatron_files(directory), translated),
        ("Megatron-LM, example scripts", megatron_scripts(directory), command_translated),
        ("PaddleFleetX, GPT, YAML", fleetx_files(directory), checked),
        ("PaddleFleetX, GPT, scripts and test_tipc", fleetx_scripts(directory), command_checked),
    ):
        report(title, list(found), take, named=arguments.files)
    return 0


def megatron_files(directory: Path) -> Iterator[Path]:
    """Configurations of its functional tests that train a model by arguments."""
    for path in sorted(directory.rglob("functional_tests/test_cases/*/*/model_config.yaml")):
        if "MODEL_ARGS" in path.read_text(encoding="utf-8"):
            yield path


def megatron_scripts(directory: Path) -> Iterator[Started]:
    """What its example scripts start of ``pretrain_*.py``."""
    for root in sorted({path.parent for path in directory.rglob("pretrain_gpt.py")}):
        scripts = [path for path in sorted(root.glob("examples/**/*.sh")) if "pretrain_" in path.read_text()]
        yield from _started(root, scripts, ARGUMENTS, re.compile(r"(^|/)pretrain_\w+\.py$"))


def fleetx_files(directory: Path) -> Iterator[Path]:
    """Its GPT configurations, of both of its layouts."""
    for folder in ("ppfleetx/configs/nlp/gpt", "examples/transformer/models/GPT"):
        for place in sorted(directory.rglob(folder)):
            yield from sorted(place.rglob("*.yaml"))


def fleetx_scripts(directory: Path) -> Iterator[Started]:
    """What its scripts for GPT start, of both layouts, and its benchmarks' lists of runs."""
    for root in sorted({path.parents[2] for path in directory.rglob("projects/gpt/*.sh")}):
        scripts = [
            path
            for pattern in ("projects/gpt/*.sh", "benchmarks/test_tipc/gpt/**/N*/*.sh")
            for path in sorted(root.glob(pattern))
        ]
        yield from _started(root, scripts, (), re.compile(r"\.py$"))
        later = root / "examples/transformer/models/GPT"
        for task in GLUE_OUTPUTS:
            yield from _started(later, sorted(later.glob("*/run_task.sh")), (task,), re.compile(r"\.py$"))


def _started(
    root: Path, scripts: Sequence[Path], arguments: Sequence[str], program: re.Pattern[str]
) -> Iterator[Started]:
    """The command lines of ``program`` that ``scripts`` start, run in a copy of ``root``."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / root.name
        shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        rules, record, benchmark = (Path(scratch) / name for name in ("rules", "record", "benchmark"))
        rules.write_text(_BASH)
        (benchmark / "scripts").mkdir(parents=True)
        (benchmark / "scripts" / "run_model.sh").write_text("_run() { _train; }\n")
        environment = {
            "PATH": str(scratch),
            "BASH_ENV": str(rules),
            "RECORD": str(record),
            "BENCHMARK_ROOT": str(benchmark),
        }
        for script in scripts:
            record.write_text("")
            subprocess.run(
                ["/bin/bash", str(script.relative_to(root)), *arguments],
                cwd=copy,
                env=environment,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=60,
                check=False,
            )
            for line in record.read_text().split("\0\0"):
                place, *words = line.split("\0")
                if any(program.search(word) for word in words):
                    directory = root / os.path.relpath(place or ".", copy)
                    yield Started(script, directory, tuple(filter(None, words)))


def translated(path: Path) -> None:
    """Translate; the number of ranks is the least that the plan can be of. Where the tests' own environment
    would name a directory, there is one with a vocabulary of GPT-2's size."""
    if program := _program(path):
        refuse_other_models([program])
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary, copy = Path(scratch) / "vocab.json", Path(scratch) / "arguments.yaml"
        vocabulary.write_text(json.dumps({f"token{number}": number for number in range(50257)}))
        text = re.sub(r"(--vocab-file:).*", rf"\1 {vocabulary}", path.read_text(encoding="utf-8"))
        copy.write_text(re.sub(r"\$\{\w+\}", scratch, text.replace("${REPEAT}", "1")))
        result = of_file(copy, [])
    _for_ranks(lambda ranks: load_tree(result.tree(), result.warnings, world_size=ranks), None)


def command_translated(started: Started) -> None:
    """Translate a command line."""
    result, least = translation_of(started.words), without_launcher(started.words)[0]
    _for_ranks(lambda ranks: load_tree(result.tree(), result.warnings, world_size=ranks), least)


def _program(path: Path) -> str | None:
    """The program of a functional test, from the recipe that lists it."""
    return _programs(path.parents[4] / "test_utils/recipes").get(path.parent.name)


@cache
def _programs(recipes: Path) -> dict[str, str]:
    """The program of each functional test."""
    found = {}
    for recipe in recipes.glob("**/*.yaml"):
        text = recipe.read_text(encoding="utf-8")
        if script := re.search(r"TRAINING_SCRIPT_PATH=(\S+\.py)", text):
            found |= dict.fromkeys(re.findall(r"test_case: \[([^\]]+)\]", text), script[1])
    return found


def _for_ranks(load: Callable[[int], object], least: int | None) -> None:
    """Load for ``least`` ranks, or the first power of two times that number that the plan can be of: a script
    does not say of how many machines it is one."""
    for power in range(MOST_RANKS.bit_length()):
        try:
            load((least or 1) * 2**power)
            return
        except UserError as error:
            last = error
            if "started, but" not in str(error):
                raise
    raise last


def checked(path: Path) -> None:
    """Load, and look at it as ``--check`` does."""
    check_report(load_config(path), "gpu")


def command_checked(started: Started) -> None:
    """Load the file and the overrides of a command line of FleetX's programs."""
    world, words, _ = without_launcher(started.words)
    program = next(word for word in started.words if word.endswith(".py"))
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-c", "--config", required=True)
    parser.add_argument("-o", "--override", action="append", default=[])
    try:
        given, _ = parser.parse_known_args(words)
    except (argparse.ArgumentError, SystemExit):
        raise ConfigError("takes other arguments than -c FILE -o KEY=VALUE", key=program) from None
    path = started.directory / given.config
    _for_ranks(lambda ranks: check_report(load_config(path, given.override, world_size=ranks), "gpu"), world)


def report(title: str, found: list[Path] | list[Started], take: Callable, *, named: bool) -> None:
    """Print how many are accepted, and the first reason of the others."""
    reasons: dict[str, list[Path | Started]] = defaultdict(list)
    for one in found:
        try:
            take(one)
        except UserError as error:
            reasons[_reason(str(error))].append(one)
    refused = sum(map(len, reasons.values()))
    print(f"## {title}: {len(found) - refused} of {len(found)} accepted\n")
    for reason, ones in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        print(f"{len(ones):4}  {reason}")
        for one in ones if named else ():
            print(f"        {one}")
    print()


def _reason(message: str) -> str:
    """Without places and values, which differ from file to file."""
    first = re.sub(r" = ('[^']*'|\[[^\]]*\]|\S+?)(?= \(|: )", "", message.splitlines()[0], count=1)
    return re.sub(r"\s*\([^()]*(\.yaml|argument)[^()]*\)|[^\s:]*\.yaml(:\d+)?", "", first)[:150]


if __name__ == "__main__":
    sys.exit(main())
