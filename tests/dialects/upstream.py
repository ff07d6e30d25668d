"""What other toolkits' own configurations come to here: ``python -m tests.dialects.upstream DIR``.

DIR holds checkouts of Megatron-LM and PaddleFleetX, as they are. Each YAML of Megatron's functional tests
goes through ``translate``, each of FleetX's through ``--check``; what is refused is grouped by its reason.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from ppfleetx.config.errors import UserError
from ppfleetx.config.loader import load_config, load_tree
from ppfleetx.core.programs.check import check_report
from ppfleetx.dialects.megatron.dialect import of_file

MOST_RANKS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--files", action="store_true", help="name the files of each reason")
    arguments = parser.parse_args()
    logging.disable()
    for title, files, take in (
        ("Megatron-LM, functional tests", megatron_files(arguments.directory), translated),
        ("PaddleFleetX, GPT", fleetx_files(arguments.directory), checked),
    ):
        report(title, list(files), take, named=arguments.files)
    return 0


def megatron_files(directory: Path) -> Iterator[Path]:
    """Configurations of its functional tests that train a GPT by arguments."""
    for path in sorted(directory.rglob("functional_tests/test_cases/*/*/model_config.yaml")):
        if "MODEL_ARGS" in path.read_text(encoding="utf-8"):
            yield path


def fleetx_files(directory: Path) -> Iterator[Path]:
    """Its GPT configurations, of both of its layouts."""
    for folder in ("ppfleetx/configs/nlp/gpt", "examples/transformer/models/GPT"):
        for place in sorted(directory.rglob(folder)):
            yield from sorted(place.rglob("*.yaml"))


def translated(path: Path) -> None:
    """Translate; the number of ranks is the least that the plan can be of. Where the tests' own environment
    would name a directory, there is one with a vocabulary of GPT-2's size."""
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary, copy = Path(scratch) / "vocab.json", Path(scratch) / "arguments.yaml"
        vocabulary.write_text(json.dumps({f"token{number}": number for number in range(50257)}))
        text = re.sub(r"(--vocab-file:).*", rf"\1 {vocabulary}", path.read_text(encoding="utf-8"))
        copy.write_text(re.sub(r"\$\{\w+\}", scratch, text))
        result = of_file(copy, [])
    last: UserError | None = None
    for world in (2**power for power in range(MOST_RANKS.bit_length())):
        try:
            load_tree(result.tree(), result.warnings, world_size=world)
            return
        except UserError as error:
            last = last or error
    raise last


def checked(path: Path) -> None:
    """Load, and look at it as ``--check`` does."""
    check_report(load_config(path), "gpu")


def report(title: str, files: list[Path], take: Callable[[Path], None], *, named: bool) -> None:
    """Print how many are accepted, and the first reason of the others."""
    reasons: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        try:
            take(path)
        except UserError as error:
            reasons[_reason(str(error))].append(path)
    refused = sum(map(len, reasons.values()))
    print(f"## {title}: {len(files) - refused} of {len(files)} accepted\n")
    for reason, paths in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        print(f"{len(paths):4}  {reason}")
        for path in paths if named else ():
            print(f"        {path}")
    print()


def _reason(message: str) -> str:
    """Without places, which differ from file to file."""
    return re.sub(r"\s*\([^()]*\.yaml[^()]*\)|[^\s:]*\.yaml(:\d+)?", "", message.splitlines()[0])[:150]


if __name__ == "__main__":
    sys.exit(main())
