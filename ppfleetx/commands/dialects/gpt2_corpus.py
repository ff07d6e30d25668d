"""What ``projects/megatron/test/dataset_preprocess_gpt.sh`` does: the corpus that its neighbours read."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ppfleetx.config.errors import DataError
from ppfleetx.data.prepare.corpus import find_sources
from ppfleetx.data.prepare.preprocess import preprocess
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.utils.files import atomic_write
from ppfleetx.utils.foreign_files import os_errors

NAME = "my-gpt_text_sentence"
_VOCAB, _MERGES, _TEXT = "gpt2-vocab.json", "gpt2-merges.txt", "wiki_all.json"


def run(argv: Sequence[str]) -> None:
    """The program of the script.

    Raises:
        DataError: no text, no vocabulary, or a corpus that is there already.
    """
    parser = argparse.ArgumentParser(prog="dataset_preprocess_gpt.sh", description=__doc__)
    add = parser.add_argument
    add(
        "--output_dir",
        default="./data",
        type=Path,
        metavar="DIR",
        help=f"has {_VOCAB} and {_MERGES} (./data)",
    )
    add("--input", type=Path, metavar="FILE", help=f'one {{"text": ...}} a line (DIR/{_TEXT})')
    add("--extracted", default="./text", type=Path, metavar="DIR", help="WikiExtractor's output (./text)")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N", help="processes")
    args = parser.parse_args(list(argv))
    if args.workers < 1:
        raise DataError(f"--workers {args.workers}: at least 1 is needed")
    for name in (_VOCAB, _MERGES):
        if not (args.output_dir / name).is_file():
            raise DataError(
                f"{args.output_dir / name} is not there. Nothing is downloaded: take vocab.json and "
                "merges.txt of https://huggingface.co/openai-community/gpt2, under these names"
            )
    text = args.input or _text(args.output_dir, args.extracted)
    print(_encode(text, args.output_dir, args.workers))


@os_errors(DataError)
def _text(output_dir: Path, extracted: Path) -> Path:
    """The text in its usual place; where WikiExtractor has left parts of it, they are joined there."""
    text = output_dir / _TEXT
    if text.exists():
        return text
    parts = sorted(path for path in extracted.rglob("*") if path.is_file()) if extracted.is_dir() else []
    if not parts:
        raise DataError(
            f"there is no text: give --input FILE with one JSON object a line, put it at {text}, or let "
            f"WikiExtractor --json write a dump of Wikipedia to {extracted}"
        )
    with atomic_write(text, "wb") as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)
    print(f"{len(parts)} files of {extracted} are now {text}")
    return text


@os_errors(DataError)
def _encode(text: Path, output_dir: Path, workers: int) -> str:
    """Write the pair, whole or not at all; what was done, in words."""
    target = output_dir / NAME
    for suffix in (".bin", ".idx"):
        if Path(f"{target}{suffix}").exists():
            raise DataError(f"{target}{suffix} is there already; nothing is overwritten")
    tokenizer = Tokenizer.from_vocab_and_merges(str(output_dir / _VOCAB), str(output_dir / _MERGES))
    with tempfile.TemporaryDirectory(dir=output_dir, prefix=".preparing-") as scratch:
        report = preprocess(find_sources([str(text)]), Path(scratch) / "my-gpt", tokenizer, workers=workers)
        for path in sorted(Path(scratch).iterdir(), reverse=True):
            path.rename(output_dir / path.name.replace("my-gpt_text_document", NAME))
    report.outputs = [str(target)]
    return str(report)
